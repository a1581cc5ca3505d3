"""A picture of the table, for the README."""

from collections.abc import Sequence
from pathlib import Path

from harness import Row


def plot(rows: Sequence[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys(row.group for row in rows))
    heights = [sum(row.group == group for row in rows) for group in groups]
    figure, panels = pyplot.subplots(
        len(groups),
        1,
        figsize=(9, 0.34 * len(rows) + 0.9 * len(groups)),
        gridspec_kw={"height_ratios": [height + 1 for height in heights]},
        layout="constrained",
        squeeze=False,
    )
    for group, axes in zip(groups, panels[:, 0], strict=True):
        own = [row for row in rows if row.group == group]
        values = [row.ratio.value for row in own]
        spread = [
            [row.ratio.value - row.ratio.low for row in own],
            [row.ratio.high - row.ratio.value for row in own],
        ]
        axes.barh([row.name for row in own], values, xerr=spread, color="#4878a8", ecolor="#333")
        axes.axvline(1, color="#999", linewidth=1)
        axes.set_title(group, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
