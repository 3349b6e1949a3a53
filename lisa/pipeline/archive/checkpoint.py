"""Checks that Spark's checkpoint matches an archive.

Spark continues after the last batch that its checkpoint marks as committed. If the archive lacks
that batch (it was restored from a backup, its database failed over to an older replica, or the
checkpoint belongs to another archive), the events in between would be skipped silently, and the
journal would trim them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.folder import Folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive.records import ArchiveGap


def check_checkpoint(
    spark: SparkSession,
    checkpoint: str,
    offsets: Mapping[str, tuple[str, int]],
    gaps: Sequence[ArchiveGap],
) -> None:
    """Raises ConfigError if a checkpoint is ahead of the archive.

    offsets: journal -> entry id and number of the archive's last event. gaps: the archive's
    recorded gaps; a gap after the last event explains why the checkpoint is ahead.
    """
    for journal, one in _committed(Folder(spark, checkpoint)).items():
        if journal not in offsets and _is_beginning(one):
            continue  # no batch had events of this journal
        entry = str(one["id"])
        mine = offsets[journal][0] if journal in offsets else "0-0"
        is_recorded = any(
            gap.journal == journal and entry_number(gap.after_id or "0-0") >= entry_number(mine)
            for gap in gaps
        )
        if entry_number(mine) < entry_number(entry) and not is_recorded:
            raise ConfigError(
                f"checkpoint {checkpoint} is ahead of the archive: for topic {journal!r} it is at "
                f"{entry}, the archive at {mine}. The checkpoint belongs to another archive, or "
                "the archive was restored from an older state. Remove the checkpoint, or use a new "
                "one; the archive then continues after its own last event"
            )


def _committed(checkpoint: Folder) -> dict[str, dict[str, Any]]:
    """Journal -> its offset at the end of the last batch that Spark committed."""
    batches = [int(name) for name in checkpoint.names("commits") if name.isdigit()]
    text = checkpoint.read(f"offsets/{max(batches)}") if batches else None
    last = text.strip().rpartition("\n")[2] if text else "{}"
    found: dict[str, dict[str, Any]] = json.loads(last) if last.startswith("{") else {}
    return found


def _is_beginning(offset: Mapping[str, Any]) -> bool:
    """Whether an offset is the start of its journal, so that no event was read yet."""
    return "gap" not in offset and offset.get("from") == {"id": offset["id"], "n": offset["n"]}
