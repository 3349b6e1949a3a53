"""Checks every message body and every record that names a message id, in atomic steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lisa.admin.fsck.report import CheckReport, Finding, attempt
from lisa.admin.reading import scan_keys
from lisa.core.model.errors import LisaError
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal
from lisa.core.store.paging import START, member_page, readable
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.upkeep import Mend

CALLS_PER_BATCH = 5
"""Divides the batch size, because checking an id takes longer than moving a message."""

EXISTS_PER_CALL = 200


@dataclass(slots=True)
class IdCheck:
    """Checks the ids of messages; `undeclared` are the groups with keys but no declaration."""

    store: Store
    report: CheckReport
    repair: bool
    undeclared: dict[str, set[str]] = field(default_factory=dict)

    def bodies(self, pattern: str, is_checked: Callable[[str], Flow[bool]] | None) -> Flow[None]:
        """Scan the key space once and check each body of the selected topics."""
        cursor = None
        while cursor != START:
            cursor, names = yield from scan_keys(self.store, pattern, cursor or START)
            by_topic: dict[str, list[bytes]] = {}
            for name in names:
                topic, one = self._id_of(name)
                if topic is not None:
                    by_topic.setdefault(topic, []).append(one)
            for topic, ids in by_topic.items():
                if is_checked is not None and not (yield from is_checked(topic)):
                    continue
                self.report.bodies += len(ids)
                yield from self._check(topic, self._readable(topic, None, ids))

    def _id_of(self, name: bytes) -> tuple[str | None, bytes]:
        key = name.decode("utf-8", "surrogateescape")
        topic = self.store.keys.shard_of(key)
        if topic is None:
            return None, b""
        one = self.store.keys.topic(topic).id_of_body(key)
        return topic, one.encode("utf-8", "surrogateescape")

    def records(self, topic: str) -> Flow[None]:
        """Page through all records that name ids of a topic, and check ids without a body."""
        keys = self.store.keys.topic(topic)
        yield from self._named(topic, None, "ZSCAN", keys.waiting)
        yield from self._named(topic, None, "HSCAN", keys.policy)
        yield from self._named(topic, None, "ZSCAN", keys.expiry)
        for group in (yield from self.store.groups(topic)):
            own = keys.group(group)
            for command, key in (
                ("HSCAN", own.entries),
                ("ZSCAN", own.retry),
                ("ZSCAN", own.garbage),
                ("HSCAN", own.attempts),
                ("HSCAN", own.reasons),
                ("ZSCAN", own.leases),
            ):
                yield from self._named(topic, group, command, key)

    def _named(self, topic: str, group: str | None, command: str, key: str) -> Flow[None]:
        keys, cursor = self.store.keys.topic(topic), None
        while cursor != START:
            cursor, members = yield from member_page(self.store, command, key, cursor or START)
            self.report.records += len(members)
            for some in chunks(self._readable(topic, group, members), EXISTS_PER_CALL):
                # `bodies` checks live ids; one EXISTS shows whether there are others.
                live = yield from self.store.command("EXISTS", *map(keys.body, some))
                if live < len(some):
                    yield from self._check(topic, some, only="no-body")

    def _readable(self, topic: str, group: str | None, ids: Sequence[bytes]) -> list[str]:
        names, foreign = readable(ids)
        for one in foreign:
            what = f"{one[:80]!r}: not an id of a message; remove it manually"
            self.report.add(Finding(kind="bad-id", topic=topic, group=group, what=what))
        return names

    def _check(self, topic: str, ids: Sequence[str], only: str = "") -> Flow[None]:
        """Report the findings about ids and repair them if enabled. `only`: one kind."""
        size = max(1, self.store.batch_size(topic) // CALLS_PER_BATCH)
        for some in chunks(ids, size):
            wrong = yield from self._findings(topic, some)
            lost = [one for one, kinds in wrong.items() if "no-place" in kinds]
            if lost:
                for one in (yield from self._owed_elsewhere(topic, lost)):
                    del wrong[one]
            if only:
                wrong = {one: kinds for one, kinds in wrong.items() if only in kinds}
            mended: list[list[str]] | LisaError = []
            if self.repair and wrong:
                mended = yield from attempt(self.store.run(Mend(topic, list(wrong))))
                if not isinstance(mended, LisaError):
                    # Report the repair's own findings: an id may have changed since.
                    wrong = dict(zip(wrong, mended, strict=True))
            for one, kinds in wrong.items():
                for kind in dict.fromkeys(kinds):
                    finding = Finding(kind=kind, topic=topic, id=one)
                    self.report.add(finding.after(mended) if self.repair else finding)

    def _findings(self, topic: str, ids: Sequence[str]) -> Flow[dict[str, list[str]]]:
        found = yield from self.store.run(Mend(topic, ids, judge=True))
        return {one: kinds for one, kinds in zip(ids, found, strict=True) if kinds}

    def _owed_elsewhere(self, topic: str, ids: Sequence[str]) -> Flow[set[str]]:
        """The `ids` that an undeclared group still has to settle, or that were settled meanwhile.

        While a group is being removed, only its own keys contain its messages.
        """
        keys = self.store.keys.topic(topic)
        removed = yield from group_removal.being_removed(self.store, topic)
        names = self.undeclared.get(topic, set()) | removed
        owed: set[str] = set()
        for group in names:
            own = keys.group(group)
            asked = [
                command
                for one in ids
                for command in (
                    ("HEXISTS", own.entries, one),
                    ("ZSCORE", own.retry, one),
                    ("ZSCORE", own.garbage, one),
                )
            ]
            replies = yield from self.store.commands(asked)
            owed |= {one for i, one in enumerate(ids) if any(replies[3 * i : 3 * i + 3])}
        rest = [one for one in ids if one not in owed]
        if rest:
            # A removal that was running at the first check may have settled them by now.
            again = yield from self._findings(topic, rest)
            owed |= {one for one in rest if "no-place" not in again.get(one, ())}
        return owed
