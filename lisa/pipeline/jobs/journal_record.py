"""The archive's progress, as recorded on the server for each journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from lisa.admin import push
from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import Shard, is_of_layout
from lisa.core.store import group_removal
from lisa.core.store.reshard import states_of
from lisa.pipeline.archive import TopicRecord
from lisa.pipeline.server import Server
from lisa.pipeline.source.following import journals, record_archived
from lisa.pipeline.source.marks import Mark


class JournalRecord:
    """The archive's progress, as recorded on the server for each journal."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._store = server.connect()

    def begin(self, offsets: Mapping[str, tuple[str, int]], topics: Sequence[str] | None) -> None:
        """Set the recorded progress to the archive's offsets, and delete all other records.

        A new archive thus begins at the first event of each journal, even if an earlier archive of
        the same name had advanced further.
        """
        store = self._store
        store.drive(store.check_schema())
        known = {*(topics or ()), *store.drive(journals(store, topics or ()))}
        for journal in known - offsets.keys():
            store.ask("HDEL", store.keys.topic(journal).archived, self.name)
        self.report(offsets)

    def report(self, offsets: Mapping[str, tuple[str, int]]) -> int | None:
        """Record the archive's offsets; returns the age of its newest event in ms."""
        marks = {journal: Mark(*mark) for journal, mark in offsets.items()}
        if not marks:
            return None
        self._store.drive(record_archived(self._store, self.name, marks))
        newest = max(mark.where[0] for mark in marks.values())
        return max(0, self._store.drive(self._store.server_time_ms()) - newest)

    def topics(self, names: Sequence[str]) -> dict[str, TopicRecord]:
        """Topic -> its present options and groups."""
        store, found = self._store, {}
        states = store.drive(states_of(store, list(map(Shard, names)))) if names else []
        for name, state in zip(names, states, strict=True):
            # Push targets contain secrets, and are not archived. Shard layout and pending removals
            # only apply to the present server.
            kept = {
                key: value
                for key, value in state.options.items()
                if not (
                    key.startswith(push.FIELD) or is_of_layout(key) or group_removal.is_mark(key)
                )
            }
            found[name] = TopicRecord(kept, tuple(sorted(state.groups)))
        return found

    def close(self) -> None:
        """Close the connection."""
        with suppress(LisaError):
            self._store.close()
