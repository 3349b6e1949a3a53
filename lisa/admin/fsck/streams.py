"""Checks ready streams: entries missing from the index, and deliveries without an entry."""

from __future__ import annotations

from dataclasses import dataclass

from lisa.admin.fsck.report import CheckReport, Finding, attempt
from lisa.admin.reading import ask_stream, pending_entries, stream_group, stream_ids
from lisa.core.model.keys import GroupKeys
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import PAGE
from lisa.core.store.store import Store
from lisa.core.transitions.groups import Declare


@dataclass(slots=True)
class StreamCheck:
    """Checks the streams of a topic's groups, page by page."""

    store: Store
    report: CheckReport
    repair: bool

    def check(self, topic: str) -> Flow[None]:
        """Check the streams of all groups of a topic."""
        for group in (yield from self.store.groups(topic)):
            keys = self.store.keys.topic(topic).group(group)
            if (yield from self._finds_group(keys.ready, group)):
                yield from self._entries(topic, group, keys)
                yield from self._pending(topic, group, keys)

    def missing(self, topic: str) -> Flow[None]:
        """Find declared groups without a stream, skipping groups that are undeclared meanwhile."""
        for group in (yield from self.store.groups(topic)):
            stream = self.store.keys.topic(topic).group(group).ready
            if (yield from self._finds_group(stream, group)):
                continue
            declared = group in (yield from self.store.groups(topic))
            if not declared or (yield from self._finds_group(stream, group)):
                continue
            finding = Finding(kind="no-stream", topic=topic, group=group)
            if self.repair:
                done = yield from attempt(self.store.run(Declare(topic, group, only_mend=True)))
                if group not in (yield from self.store.groups(topic)):
                    continue
                finding = finding.after(done)
            self.report.add(finding)

    def _finds_group(self, stream: str, group: str) -> Flow[bool]:
        reply = yield from ask_stream(self.store, "XINFO", "GROUPS", stream)
        return stream_group(reply, group) is not None

    def _entries(self, topic: str, group: str, keys: GroupKeys) -> Flow[None]:
        start = "-"
        while True:
            window = yield from self.store.command("XRANGE", keys.ready, start, "+", "COUNT", PAGE)
            if not window:
                return
            self.report.entries += len(window)
            found = stream_ids(window)
            indexed = yield from self.store.command(
                "HMGET", keys.entries, *(one or b"" for _, one, _ in found)
            )
            foreign = [
                entry
                for (entry, _, _), named in zip(found, indexed, strict=True)
                if named != entry.encode()
            ]
            for entry in foreign:
                yield from self._foreign(topic, group, keys, entry)
            start = f"({found[-1][0]}"

    def _foreign(self, topic: str, group: str, keys: GroupKeys, entry: str) -> Flow[None]:
        # Scripts add an entry and its index record in one step. An entry that was not in the index
        # and still exists was therefore added by another program.
        still = yield from self.store.command("XRANGE", keys.ready, entry, entry)
        if not still:
            return
        one = stream_ids(still)[0][1]
        what = f"entry {entry}" + (f", id {one.decode('utf-8', 'replace')[:80]!r}" if one else "")
        finding = Finding(kind="foreign-entry", topic=topic, group=group, what=what)
        if self.repair:
            away = [("XACK", keys.ready, group, entry), ("XDEL", keys.ready, entry)]
            finding = finding.after((yield from attempt(self.store.commands(away))))
        self.report.add(finding)

    def _pending(self, topic: str, group: str, keys: GroupKeys) -> Flow[None]:
        start = "-"
        while True:
            held = yield from pending_entries(self.store, keys.ready, group, start, PAGE)
            if not held:
                return
            for row, item in held:
                if item is None:
                    yield from self._lost(topic, group, keys, row[0].decode())
            start = f"({held[-1][0][0].decode()}"

    def _lost(self, topic: str, group: str, keys: GroupKeys, entry: str) -> Flow[None]:
        # Scripts remove an entry from the pending list and the stream in one step.
        still = yield from ask_stream(self.store, "XPENDING", keys.ready, group, entry, entry, 1)
        if not still:
            return
        what = f"entry {entry}, held by {still[0][1].decode('utf-8', 'replace')}"
        finding = Finding(kind="pending-lost", topic=topic, group=group, what=what)
        if self.repair:
            away = self.store.command("XACK", keys.ready, group, entry)
            finding = finding.after((yield from attempt(away)))
        self.report.add(finding)
