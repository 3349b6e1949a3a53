"""The jobs `retain` and `erase`: they delete messages and their events from an archive in files."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError
from lisa.core.model.stream import entry_fields
from lisa.core.store.replies import pairs
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.base import STEPS_PER_CALL
from lisa.core.transitions.journal import ARCHIVE_HOLDS_MS, archive_records
from lisa.pipeline.archive import open_files
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.lookup import known
from lisa.pipeline.jobs.message_history import topics_in
from lisa.pipeline.server import Server, check_layout
from lisa.pipeline.source.following import journals, read_pages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class ArchiveDeletion:
    """What a job deleted.

    messages, events: rows of `messages` and `message_log`. journal: entries of journals.
    unread: entries of these ids that an archive has not read yet and that were therefore kept.
    """

    messages: int
    events: int
    journal: int = 0
    unread: int = 0
    seconds: float = 0.0


@unwrapped()
def retain(
    spark: SparkSession,
    where: str,
    keep: timedelta,
) -> ArchiveDeletion:
    """Delete messages that ended more than `keep` ago, with all of their events.

    An id that is live, or that was sent again and ended later, keeps all of its lives. Gaps remain
    recorded. The archive must not be written to meanwhile. Raises ConfigError if `keep` is not
    positive or reaches back before the year 1, or if there is no archive.
    """
    if keep <= timedelta(0):
        raise ConfigError("keep must be positive: it is how long ended messages stay")
    began = time.monotonic()
    try:
        cutoff = datetime.now(UTC) - keep
    except OverflowError:
        raise ConfigError("keep reaches back before the year 1; use a shorter time") from None
    open_files(spark, where)  # the writer would create it
    removed = FileWriter(spark, where).retain(cutoff)
    return ArchiveDeletion(*removed, seconds=time.monotonic() - began)


@unwrapped()
def erase(
    spark: SparkSession,
    where: str,
    ids: Collection[str],
    *,
    topics: Sequence[str] | None = None,
    server: Server | None = None,
) -> ArchiveDeletion:
    """Delete messages with these ids from the archive, its earlier versions, and the journals.

    topics: only in these; None means all topics of the archive. server: None to leave journals
    alone. The archive must not be written to meanwhile. If the result has `unread` entries, run
    the archive once and repeat the erasure.

    Raises ConfigError if the archive does not exist or has no such topic, or if one of the messages
    is live on the server.
    """
    began = time.monotonic()
    archive = open_files(spark, where)
    offsets = archive.offsets()
    owners = topics_in(archive, topics)
    if server is not None:
        with server.open() as store:
            store.drive(check_layout(store))
            _check_not_live(store, owners, list(ids))
    removed = FileWriter(spark, where).erase(ids, topics)
    deleted = unread = 0
    if server is not None and owners:
        with server.open() as store:
            deleted, unread = _erase_from_journals(store, owners, set(ids), offsets)
    return ArchiveDeletion(*removed, deleted, unread, time.monotonic() - began)


def _check_not_live(store: SyncStore, topics: Iterable[str], ids: Sequence[str]) -> None:
    for topic in topics:
        store.drive(store.groups(topic))
        found = store.drive(known(store, topic, ids))
        live = sorted(message_id for message_id, seen in found.items() if seen.envelope)
        if live:
            raise ConfigError(
                f"message {live[0]!r} of topic {topic!r} is live: its next event would be archived "
                f"again. Cancel it first: lisa cancel {topic} {live[0]}"
            )


def _erase_from_journals(
    store: SyncStore, topics: Sequence[str], ids: set[str], offsets: Mapping[str, tuple[str, int]]
) -> tuple[int, int]:
    """Delete entries that all archives have read; returns their number and that of the others.

    For an archive that has not read an entry yet, a deleted entry would be a gap.
    """
    wanted = {message_id.encode() for message_id in ids}
    deleted = unread = 0
    for journal in store.drive(journals(store, topics)):
        end, doomed = _read_by_all(store, journal, offsets), []
        for items in read_pages(store, journal, "-", "+"):
            for entry, flat in items:
                if entry_fields(flat).get(b"id") not in wanted:
                    continue
                if entry_number(entry.decode()) <= end:
                    doomed.append(entry)
                else:
                    unread += 1
        for part in chunks(doomed, STEPS_PER_CALL):
            deleted += store.ask("XDEL", store.keys.topic(journal).events, *part)
    return deleted, unread


def _read_by_all(
    store: SyncStore, journal: str, offsets: Mapping[str, tuple[str, int]]
) -> tuple[int, int]:
    """The position up to which this archive and all reporting archives have read a journal."""
    end = entry_number(offsets[journal][0]) if journal in offsets else (0, 0)
    since_ms = store.drive(store.server_time_ms()) - ARCHIVE_HOLDS_MS
    archived = store.ask("HGETALL", store.keys.topic(journal).archived)
    for record in archive_records(pairs(archived)).values():
        if record.reported_ms > since_ms:
            end = min(end, entry_number(record.entry))
    return end
