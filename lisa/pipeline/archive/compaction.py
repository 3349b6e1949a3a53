"""Few large files out of many small ones.

Files of like size are put together, so that each row is written anew only a few times on its way
from a batch's file to one of the full size, however small the batches are.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lisa.pipeline.archive.manifest import Manifest, Swap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["FULL_BYTES", "MANY", "Group", "candidates", "compact", "exchange"]

FULL_BYTES = 128 * 1024 * 1024
MANY = 16
"""So many files of like size are worth it while their day lasts."""


@dataclass(frozen=True, slots=True)
class Group:
    """Files of one table, day and topic, to be put together."""

    table: str
    paths: tuple[str, ...]
    size: int


def candidates(
    manifest: Manifest, today: str, *, skip: Collection[str], all_of_it: bool = False
) -> Iterator[Group]:
    """What is due: of past days whatever is small, of today's many of like size."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, size in manifest.files.items():
        if path not in skip and path not in manifest.unfolded and size < FULL_BYTES // 2:
            places[path.rpartition("/")[0]].append(path)
    for place, paths in sorted(places.items()):
        table, day = place.split("/")[:2]
        past = all_of_it or day.removeprefix("day=") < today
        sizes = manifest.files
        alike: dict[int, list[str]] = defaultdict(list)
        for path in paths:
            alike[0 if past else int(math.log(max(sizes[path], 1), 8))].append(path)
        for some in alike.values():
            if len(some) >= (2 if past else MANY):
                yield Group(table, tuple(sorted(some)), sum(sizes[path] for path in some))


def compact(rows: DataFrame, group: Group) -> DataFrame:
    """The rows of a group in as few partitions as its size asks for, in order."""
    order = ("at", "seq") if "seq" in rows.columns else ("settled_at", "id")
    parts = max(1, math.ceil(group.size / FULL_BYTES))
    if parts == 1:
        return rows.coalesce(1).sortWithinPartitions(*order)
    return rows.repartitionByRange(parts, *order).sortWithinPartitions(*order)


def exchange(manifest: Manifest, group: Group, fresh: dict[str, int]) -> Manifest:
    """The manifest with what came out in place of the group's files."""
    files = {path: size for path, size in manifest.files.items() if path not in group.paths}
    swap = Swap(int(time.time() * 1000), group.paths, tuple(fresh))
    return replace(manifest, files=files | fresh, swaps=(*manifest.swaps, swap))
