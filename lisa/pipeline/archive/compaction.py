"""Merges many small files into few large ones.

Only files of similar size are merged, so each row is rewritten only a few times between the file
of its batch and a file of full size, however small the batches are.
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

FULL_BYTES = 128 * 1024 * 1024
MANY = 16
"""Number of files of similar size that are merged while their day is not over."""


@dataclass(frozen=True, slots=True)
class Group:
    """Files of one table, day and topic that are merged together; `size` in bytes."""

    table: str
    paths: tuple[str, ...]
    size: int


def candidates(
    manifest: Manifest, today: str, *, skip: Collection[str], everything: bool = False
) -> Iterator[Group]:
    """Groups to merge: all small files of past days, and today's if many have a similar size."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path, size in manifest.files.items():
        if path not in skip and path not in manifest.unfolded and size < FULL_BYTES // 2:
            folders[path.rpartition("/")[0]].append(path)
    for folder, paths in sorted(folders.items()):
        table, day = folder.split("/")[:2]
        past = everything or day.removeprefix("day=") < today
        sizes = manifest.files
        alike: dict[int, list[str]] = defaultdict(list)
        for path in paths:
            alike[0 if past else int(math.log(max(sizes[path], 1), 8))].append(path)
        for some in alike.values():
            if len(some) >= (2 if past else MANY):
                yield Group(table, tuple(sorted(some)), sum(sizes[path] for path in some))


def compact(rows: DataFrame, group: Group) -> DataFrame:
    """Sort the rows of a group into as many partitions as files of full size are needed."""
    order = ("at", "seq") if "seq" in rows.columns else ("settled_at", "id")
    parts = max(1, math.ceil(group.size / FULL_BYTES))
    if parts == 1:
        return rows.coalesce(1).sortWithinPartitions(*order)
    return rows.repartitionByRange(parts, *order).sortWithinPartitions(*order)


def exchange(manifest: Manifest, group: Group, fresh: dict[str, int]) -> Manifest:
    """The manifest with the merged files (`fresh`: path -> bytes) instead of the group's files."""
    files = {path: size for path, size in manifest.files.items() if path not in group.paths}
    swap = Swap(int(time.time() * 1000), group.paths, tuple(fresh))
    return replace(manifest, files=files | fresh, swaps=(*manifest.swaps, swap))
