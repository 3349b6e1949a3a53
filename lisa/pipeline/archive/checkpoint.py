"""Whether Spark's checkpoint and an archive belong together.

Spark goes on behind the last batch that its checkpoint calls done. Where the archive lacks that
batch (it was put back from a backup, its database failed over to an older replica, or the
checkpoint is another archive's), what lies between would be missed without a word, and the journal
would be told that it is safe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lisa.admin.reading import entry_number
from lisa.core.errors import ConfigError
from lisa.pipeline.archive.folder import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive.records import Gap

__all__ = ["check_checkpoint"]


def check_checkpoint(
    spark: SparkSession,
    checkpoint: str,
    offsets: Mapping[str, tuple[str, int]],
    gaps: Sequence[Gap],
) -> None:
    """Raises ConfigError where a checkpoint goes on behind events that an archive lacks.

    offsets: for each journal, by its place, the archive's last event. gaps: those it has recorded;
    one at its end stands for what the checkpoint is ahead.
    """
    for place, one in _done(Folder(spark, checkpoint)).items():
        if place not in offsets and _is_beginning(one):
            continue  # it had no share of any batch yet
        entry = str(one["id"])
        mine = offsets[place][0] if place in offsets else "0-0"
        told = any(
            gap.place == place and entry_number(gap.after_id or "0-0") >= entry_number(mine)
            for gap in gaps
        )
        if entry_number(mine) < entry_number(entry) and not told:
            raise ConfigError(
                f"checkpoint {checkpoint} has come further than the archive: topic {place!r} to "
                f"{entry}, the archive to {mine}; it is another archive's, or this one is an older "
                "state. Remove the checkpoint, or name a new one: then the archive goes on from "
                "what it has"
            )


def _done(notes: Folder) -> dict[str, dict[str, Any]]:
    """By place, the offset with which the last batch ended that Spark calls done."""
    batches = [int(name) for name in notes.names("commits") if name.isdigit()]
    text = notes.read(f"offsets/{max(batches)}") if batches else None
    last = text.strip().rpartition("\n")[2] if text else "{}"
    found: dict[str, dict[str, Any]] = json.loads(last) if last.startswith("{") else {}
    return found


def _is_beginning(offset: Mapping[str, Any]) -> bool:
    """Whether an offset is where its journal is begun: nothing was taken of that yet."""
    return "gap" not in offset and offset.get("from") == {"id": offset["id"], "n": offset["n"]}
