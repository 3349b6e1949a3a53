"""Reads archives in files that versions before 0.2 wrote; `lisa pipeline convert` replaces them.

message_log/day=D/topic=T/*.parquet, messages/day=D/topic=T/*.parquet
_lisa/NNNNNNNN.json         version N: its files; the highest version is current
_lisa/files-NNNNNNNN.json   the full list of files that later versions refer to
_lisa/live, _lisa/compacted events of live messages; merged files
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from lisa.pipeline.archive.base import Archive, ArchiveGap, TopicRecord
from lisa.pipeline.archive.fold import fold
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.reading import DATED_MESSAGES, HIDDEN
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_DIGITS = 8


class Manifest(msgspec.Struct, frozen=True):
    """One version. Paths are relative to the archive's directory.

    files: path -> bytes. unfolded: log files since the last fold. live: files with the events of
    messages that had not ended at the last fold. queries: streaming query -> its last batch.
    """

    base: int = 0
    added: dict[str, int] = {}
    removed: tuple[str, ...] = ()
    queries: dict[str, int] = {}
    offsets: dict[str, tuple[str, int]] = {}
    topics: dict[str, TopicRecord] = {}
    gaps: tuple[ArchiveGap, ...] = ()
    unfolded: dict[str, int] = {}
    live: tuple[str, ...] = ()


def is_old(folder: Folder) -> bool:
    """Whether a directory has an archive of this layout."""
    return bool(_versions(folder))


def convert_first(where: str) -> str:
    """The error message of a command that writes."""
    return (
        f"the archive in {where} has the layout of an earlier version, which can only be read; "
        f"convert it once: lisa pipeline convert {where}"
    )


def _versions(folder: Folder) -> list[int]:
    names = folder.names(HIDDEN)
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit() and len(stem) == _DIGITS)


class OldArchive(Archive):
    """The current version of an archive of this layout."""

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self._spark, self._folder = spark, folder
        text = folder.read(f"{HIDDEN}/{_versions(folder)[-1]:0{_DIGITS}}.json")
        self.manifest = msgspec.json.decode(text or "{}", type=Manifest)
        base = self.manifest.base
        full = folder.read(f"{HIDDEN}/files-{base:0{_DIGITS}}.json") if base else None
        self.files: set[str] = {*json.loads(full or "{}"), *self.manifest.added}
        self.files -= {*self.manifest.removed} - self.manifest.added.keys()

    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""
        return self._rows("message_log", self.files, LOG_SCHEMA, LOG_SCHEMA)

    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        ended = self._rows("messages", self.files, DATED_MESSAGES, MESSAGES_SCHEMA)
        events = self._rows("message_log", self.manifest.unfolded, LOG_SCHEMA, EVENT_SCHEMA)
        if self.manifest.live:
            paths = [self._folder.url(path) for path in self.manifest.live]
            reader = self._spark.read.schema(EVENT_SCHEMA)
            events = events.unionByName(reader.parquet(*map(literal, paths)))
        return ended.unionByName(fold(events))

    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event."""
        return dict(self.manifest.offsets)

    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups, as needed to restore it."""
        return dict(self.manifest.topics)

    def gaps(self) -> Sequence[ArchiveGap]:
        """The events that the log lacks."""
        return list(self.manifest.gaps)

    def _rows(
        self, table: str, files: Iterable[str], stored: StructType, asked: StructType
    ) -> DataFrame:
        found = self._spark.createDataFrame([], asked)
        for root in (table, f"{HIDDEN}/compacted/{table}"):
            paths = [self._folder.url(path) for path in files if path.startswith(f"{root}/")]
            if paths:
                reader = self._spark.read.schema(stored)
                reader = reader.option("basePath", self._folder.url(root))
                found = found.unionByName(reader.parquet(*map(literal, paths)).select(*asked.names))
        return found


def remove(folder: Folder, old: OldArchive) -> None:
    """Delete the files of a converted archive; last the versions, which list the others."""
    for path in (*old.files, *{path.rpartition("/")[0] for path in old.manifest.live}):
        folder.delete(path)
    for table in ("message_log", "messages"):
        for day in folder.names(table):
            for name in folder.names(f"{table}/{day}") if day.startswith("day=") else ():
                if name.startswith("topic="):
                    folder.delete(f"{table}/{day}/{name}")
    folder.delete(f"{HIDDEN}/compacted")
    for name in folder.names(HIDDEN):
        if name.endswith(".json"):
            folder.delete(f"{HIDDEN}/{name}")
