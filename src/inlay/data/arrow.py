"""Rows in Arrow's formats: parquet files, and datasets that `save_to_disk` wrote.

pyarrow and datasets are optional, and imported when there is something that needs them.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inlay.data.rows import COLUMNS
from inlay.errors import ConfigurationError

__all__ = ["choose_split", "is_saved_dataset", "parquet_count", "parquet_records", "saved_dataset"]


def parquet_records(path: Path, text_column: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file as mappings, with the columns that rows may have."""
    with _parquet_file(path) as file:
        names = file.schema_arrow.names
        wanted = [
            name for name in names if name in (text_column, *COLUMNS)
        ] or names  # named in the error
        for batch in file.iter_batches(batch_size=256, columns=wanted):
            yield from batch.to_pylist()


def parquet_count(path: Path) -> int:
    with _parquet_file(path) as file:
        return int(file.metadata.num_rows)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of the library datasets wrote a folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def saved_dataset(folder: Path, split: str | None) -> tuple[Any, str | None]:
    """Open a dataset that `save_to_disk` wrote; return it, and the split if there are several.

    :param split: the split to take; not needed if there is only one
    """
    datasets = _require("datasets", folder)
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"cannot read the dataset in {folder}: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        return choose_split(found, split, str(folder))
    if split is not None:
        raise ConfigurationError(f"{folder} is one dataset without splits; leave out {split!r}")
    return found, None


def choose_split(found: Any, split: str | None, place: str) -> tuple[Any, str | None]:
    """Return a dataset of several by the name of its split, and that name."""
    names = list(found)
    if split is None and len(names) == 1:
        return found[names[0]], None
    if split not in names:
        wanted = "" if split is None else f"no split {split!r}, only "
        raise ConfigurationError(
            f"{place} has {wanted}the splits {', '.join(names)}; choose one with split=… (--split)"
        )
    return found[split], split


def _parquet_file(path: Path) -> Any:
    parquet = _require("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def _require(module: str, path: Path) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs {library}, which is not installed: pip install {library}"
        ) from error
