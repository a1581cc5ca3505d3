"""`oneshot` of llm-compressor, cold: Inlay's pipeline over `basic` and over the default one."""

import tempfile
from collections.abc import Iterator
from itertools import product

from harness import Row, single
from overhead import model
from pipelines import INSIDE, VOCABULARY, measure

PEERS = ["basic", "independent"]


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model(VOCABULARY).save_pretrained(folder)
        for observer, count in product(("static_minmax", "mse"), (8, 64)):
            ways = [f"{INSIDE}inlay", *PEERS]
            own, *peers = (measure(way, folder, observer, count)["seconds"] for way in ways)
            for peer, seconds in zip(PEERS, peers, strict=True):
                group = f"oneshot with inlay / with {peer}"
                yield Row(group, f"{observer}, {count} batches", single(own / seconds))
