"""Ids: every body, and everything that names one, judged in atomic steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lisa.admin.fsck.report import Finding, Report, attempt
from lisa.admin.reading import scan_keys
from lisa.core import removal
from lisa.core.errors import LisaError
from lisa.core.flow import Flow
from lisa.core.pages import START, member_page, readable
from lisa.core.store import Store, chunks
from lisa.core.transitions.mend import Mend

__all__ = ["Places"]

CALLS_PER_BATCH = 5
"""A judgement costs more for each id than a batch that moves messages: smaller steps."""

EXISTS_PER_CALL = 200


@dataclass(slots=True)
class Places:
    """Judges the ids of some topics. `undeclared` are the groups found beside those declared."""

    store: Store
    report: Report
    repair: bool
    undeclared: dict[str, set[str]] = field(default_factory=dict)

    def bodies(self, pattern: str, is_checked: Callable[[str], Flow[bool]] | None) -> Flow[None]:
        """Walk the key space once and judge each body of the topics that are to be checked."""
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
                yield from self._judge(topic, self._readable(topic, None, ids))

    def _id_of(self, name: bytes) -> tuple[str | None, bytes]:
        key = name.decode("utf-8", "surrogateescape")
        topic = self.store.keys.topic_of(key)
        if topic is None:
            return None, b""
        one = self.store.keys.topic(topic).id_of_body(key)
        return topic, one.encode("utf-8", "surrogateescape")

    def records(self, topic: str) -> Flow[None]:
        """Page through all that names ids of a topic, and judge those without a body."""
        keys = self.store.keys.topic(topic)
        yield from self._named(topic, None, "ZSCAN", keys.waiting)
        yield from self._named(topic, None, "HSCAN", keys.policy)
        yield from self._named(topic, None, "ZSCAN", keys.expiry)
        for group in (yield from self.store.groups(topic)):
            own = keys.group(group)
            for command, key in (
                ("HSCAN", own.entries), ("ZSCAN", own.retry), ("ZSCAN", own.garbage),
                ("HSCAN", own.attempts), ("HSCAN", own.reasons), ("ZSCAN", own.leases),
            ):  # fmt: skip
                yield from self._named(topic, group, command, key)

    def _named(self, topic: str, group: str | None, command: str, key: str) -> Flow[None]:
        keys, cursor = self.store.keys.topic(topic), None
        while cursor != START:
            cursor, members = yield from member_page(self.store, command, key, cursor or START)
            self.report.records += len(members)
            for some in chunks(self._readable(topic, group, members), EXISTS_PER_CALL):
                # Live ids are judged where their bodies are met; here one command tells the rest.
                live = yield from self.store.command("EXISTS", *map(keys.body, some))
                if live < len(some):
                    yield from self._judge(topic, some, only="no-body")

    def _readable(self, topic: str, group: str | None, ids: Sequence[bytes]) -> list[str]:
        names, foreign = readable(ids)
        for one in foreign:
            what = f"{one[:80]!r}: remove it by hand, no message of Lisa's has it"
            self.report.add(Finding(kind="bad-id", topic=topic, group=group, what=what))
        return names

    def _judge(self, topic: str, ids: Sequence[str], only: str = "") -> Flow[None]:
        """Name what is wrong with ids, and mend it if asked to. `only` names one kind alone."""
        size = max(1, self.store.batch_size(topic) // CALLS_PER_BATCH)
        for some in chunks(ids, size):
            wrong = yield from self._said(topic, some)
            lost = [one for one, words in wrong.items() if "no-place" in words]
            if lost:
                for one in (yield from self._owed_elsewhere(topic, lost)):
                    del wrong[one]
            if only:
                wrong = {one: words for one, words in wrong.items() if only in words}
            mended: list[list[str]] | LisaError = []
            if self.repair and wrong:
                mended = yield from attempt(self.store.run(Mend(topic, list(wrong))))
                if not isinstance(mended, LisaError):
                    # What the mending says counts: an id may have come right or gone since.
                    wrong = dict(zip(wrong, mended, strict=True))
            for one, words in wrong.items():
                for kind in dict.fromkeys(words):
                    finding = Finding(kind=kind, topic=topic, id=one)
                    self.report.add(finding.after(mended) if self.repair else finding)

    def _said(self, topic: str, ids: Sequence[str]) -> Flow[dict[str, list[str]]]:
        said = yield from self.store.run(Mend(topic, ids, judge=True))
        return {one: words for one, words in zip(ids, said, strict=True) if words}

    def _owed_elsewhere(self, topic: str, ids: Sequence[str]) -> Flow[set[str]]:
        """Those of `ids` that a group owes which is no longer declared, or that have moved on.

        While a group is removed its messages stand in its keys alone until their page comes.
        """
        keys = self.store.keys.topic(topic)
        options = yield from self.store.command("HKEYS", keys.options)
        names = self.undeclared.get(topic, set()) | removal.marked(options)
        owed: set[str] = set()
        for group in names:
            own = keys.group(group)
            asked = [
                command
                for one in ids
                for command in (
                    ("HEXISTS", own.entries, one), ("ZSCORE", own.retry, one),
                    ("ZSCORE", own.garbage, one),
                )
            ]  # fmt: skip
            replies = yield from self.store.commands(asked)
            owed |= {one for i, one in enumerate(ids) if any(replies[3 * i : 3 * i + 3])}
        rest = [one for one in ids if one not in owed]
        if rest:
            # By now a removal that was under way has settled them, if that was it.
            again = yield from self._said(topic, rest)
            owed |= {one for one in rest if "no-place" not in again.get(one, ())}
        return owed
