"""Checks the consistency of all messages on a running system.

The invariants: A body exists exactly while its message is live. A live id is either in `waiting`,
or, for each group that still has to settle it, in exactly one of the group's `entries`, `retry`,
`garbage` and `parked`. Every other record names a live id. Every entry of a ready stream is in the
index. The counts of lanes agree with `entries` and `queues`.

The check reads the key space, hashes and sorted sets with SCAN and streams in pages, at most a few
hundred items per step. Messages that change state meanwhile cause no false findings: the script
that repairs ids also checks them, atomically, and the findings about stream entries stay true,
because an entry id is never used twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from lisa.admin.reading import (
    ask_stream,
    counted,
    pending_entries,
    scan_keys,
    stream_group,
    stream_ids,
)
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import GROUP_KEYS, TOPIC_KEYS, GroupKeys, check_topic
from lisa.core.model.sharding import KEY_END, Shard, Topic, key_of, topic_of, topics_of
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store import group_removal
from lisa.core.store.paging import PAGE, START, member_page, readable
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.upkeep import Mend, Recount

T = TypeVar("T")

KINDS = {
    "no-place": "a body whose message has no state",
    "no-body": "a record of a message that is not live",
    "entry-lost": "the index names a stream entry that is gone",
    "second-place": "a message in two states at once",
    "unqueued": "a parked message that has no place in its lane",
    "miscounted": "a lane with a wrong number of slots or parked messages",
    "leftover": "failed attempts of a message that the group does not have",
    "foreign-entry": "a stream entry that is not in the index",
    "pending-lost": "a delivery on the pending list whose entry is gone",
    "no-stream": "a declared group without a stream",
    "undeclared-group": "keys of a group that is not declared",
    "stray-group": "a group that a shard declares and its topic does not",
    "unregistered": "a topic with messages that managers do not know",
    "bad-id": "an id that no producer can have written",
    "wrong-type": "a key of Lisa's with a wrong type",
}
"""Every kind of finding and its meaning. Journals store these names: do not rename one."""

KEPT = 10_000
"""Maximum number of findings in a report; further ones are only counted."""

REMEMBERED = 1_000_000
"""Maximum number of findings that are remembered, so that each is counted once."""


CALLS_PER_BATCH = 5
"""Divides the batch size, because checking an id takes longer than moving a message."""

EXISTS_PER_CALL = 200
LANE_TYPES = ("hash", "hash", "zset", "zset", "zset")
TOPIC_TYPES = dict(zip(TOPIC_KEYS, ("zset", "hash", "zset", *["hash"] * 4, "stream"), strict=True))
GROUP_TYPES = dict(
    zip(GROUP_KEYS, ("stream", "hash", "zset", "zset", "hash", "hash", "zset"), strict=True)
)
RECHECK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One inconsistency; `what` has details and, after a repair, its result."""

    kind: str
    topic: str
    group: str | None = None
    id: str | None = None
    what: str = ""
    repaired: bool = False

    def after(self, repair: object) -> Finding:
        """This finding after an attempted repair: repaired, or with the repair's error."""
        if not isinstance(repair, LisaError):
            return replace(self, repaired=True)
        return replace(self, what=f"{self.what}; not repaired: {repair}".removeprefix("; "))


def attempt(repair: Flow[T]) -> Flow[T | LisaError]:
    """A repair's result or error, so that the check can continue.

    Raises ServerUnavailable, also if the server accepts no writes (out of memory, or a replica).
    """
    try:
        return (yield from repair)
    except ServerUnavailable:
        raise
    except LisaError as error:
        return error


@dataclass(slots=True)
class CheckReport:
    """The findings of a check: all are counted, the first 10,000 are kept."""

    topics: list[Topic] = field(default_factory=list)
    bodies: int = 0
    records: int = 0
    entries: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    findings: list[Finding] = field(default_factory=list)
    _named: set[tuple[str, str, str]] = field(default_factory=set, repr=False)

    @property
    def total(self) -> int:
        """Number of findings."""
        return self.kinds.total()

    @property
    def ok(self) -> bool:
        """Whether there are no findings, or all are repaired."""
        return self.repaired == self.total

    def add(self, finding: Finding) -> None:
        """Count and keep a finding.

        Findings of the same kind and id count once: several records can name an id, and SCAN can
        return a record more than once.
        """
        if topic_of(finding.topic) != finding.topic:
            what = f"{finding.what}, in shard {finding.topic}".removeprefix(", ")
            finding = replace(finding, topic=topic_of(finding.topic), what=what)
        if finding.id is not None:
            name = (finding.kind, finding.topic, finding.id)
            if name in self._named:
                return
            if len(self._named) < REMEMBERED:
                self._named.add(name)
        self.kinds[finding.kind] += 1
        self.repaired += finding.repaired
        if len(self.findings) < KEPT:
            self.findings.append(finding)


def check(
    store: Store,
    topics: Iterable[str] = (),
    *,
    repair: bool = False,
    progress: Callable[[str, CheckReport], None] | None = None,
) -> Flow[CheckReport]:
    """Check the given topics, or all topics; `repair` also fixes the findings.

    No repair loses a message: a message without a state becomes due now, and a group whose
    declaration was lost is declared again rather than emptied. A group that only shards declare is
    removed from them if the topic has other groups, which receive the same messages. A failed
    repair is noted in its finding. `progress` is called at the start of each phase. Raises
    ServerUnavailable, also if the server accepts no writes.
    """
    run = _Check(store, CheckReport(), repair, tuple(map(check_topic, topics)))
    for phase, step in (
        ("keys", run.survey),
        ("groups", run.check_groups),
        ("messages", run.bodies),
        ("records", partial(run.each, run.records)),
        ("streams", partial(run.each, run.streams)),
        ("lanes", partial(run.each, run.lanes)),
        ("topics", run.unregistered),
    ):
        if progress is not None:
            progress(phase, run.report)
        yield from step()
    run.report.topics = topics_of(run.topics)
    return run.report


@dataclass(slots=True)
class _Check:
    """A run of the check. `undeclared`: by topic, the groups with keys but no declaration."""

    store: Store
    report: CheckReport
    repair: bool
    named: tuple[str, ...]
    topics: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    undeclared: dict[str, set[str]] = field(default_factory=dict)

    def _add(self, finding: Finding, repair: Flow[object], cured: str = "") -> Flow[bool]:
        """Report a finding, after its repair if repairs are enabled; returns whether it succeeded.

        A repair that returns False found nothing to repair any more: there is no finding then.
        cured: what the finding says after its repair.
        """
        if self.repair:
            done = yield from attempt(repair)
            if done is False:
                return False
            finding = finding.after(done)
            if finding.repaired and cured:
                finding = replace(finding, what=cured)
        self.report.add(finding)
        return finding.repaired

    def each(self, step: Callable[[str], Flow[None]]) -> Flow[None]:
        """A step for each topic."""
        for topic in sorted(self.topics):
            yield from step(topic)

    def survey(self) -> Flow[None]:
        """Find topics and the keys of groups; exclude topics whose keys have a wrong type."""
        if self.named:
            parts = yield from counted(self.store, self.named)
            self.topics = {shard for shards in parts.values() for shard in shards}
        else:
            self.topics = set((yield from self.store.shards()))
        candidates: dict[str, set[str]] = {}
        cursor = None
        while cursor != START:
            cursor, names = yield from scan_keys(
                self.store, self.store.keys.structure_pattern(), cursor or START
            )
            for name in names:
                self._note(name.decode("utf-8", "replace"), candidates)
        for topic in sorted(self.topics):
            yield from self._check_types(topic)
            declared = yield from self.store.groups(topic)
            self.undeclared[topic] = candidates.get(topic, set()) - set(declared)
        self.topics -= self.broken

    def _note(self, key: str, candidates: dict[str, set[str]]) -> None:
        topic = self.store.keys.shard_of(key)
        if topic is None or (self.named and topic_of(topic) not in self.named):
            return
        self.topics.add(topic)
        group = self.store.keys.topic(topic).group_of(key)
        if group is not None:
            candidates.setdefault(topic, set()).add(group)

    def _check_types(self, topic: str) -> Flow[None]:
        keys = self.store.keys.topic(topic)
        wanted = dict(zip(keys.shared, TOPIC_TYPES.values(), strict=True))
        wanted |= {keys.consumers: "hash", keys.throttled: "zset", keys.limits: "hash"}
        kind = yield from self.store.command("TYPE", keys.groups)
        if kind == b"hash":
            for group in (yield from self.store.groups(topic)):
                wanted |= dict(zip(keys.group(group), GROUP_TYPES.values(), strict=True))
                wanted |= dict(zip(keys.lanes(group), LANE_TYPES, strict=True))
        types = yield from self.store.commands([("TYPE", key) for key in wanted])
        for (key, want), kind in zip(wanted.items(), types, strict=True):
            if kind not in (want.encode(), b"none"):
                what = f"{key} is a {kind.decode()}, not a {want}: rename or delete the key"
                self.report.add(Finding(kind="wrong-type", topic=topic, what=what))
                self.broken.add(topic)

    def check_groups(self) -> Flow[None]:
        """Find declared groups without a stream, undeclared groups with keys, and stray groups.

        Keys of an undeclared group are left by an interrupted removal or a lost declaration.
        """
        for topic in sorted(self.topics):
            yield from self._missing_streams(topic)
            for group in sorted(self.undeclared[topic]):
                yield from self._undeclared(topic, group)
        for topic in topics_of(self.topics):
            yield from self._stray(topic)

    def _stray(self, topic: str) -> Flow[None]:
        """Find groups that shards declare but their topic does not, unless one is being removed.

        They are left by a process that died before it could withdraw the group from a shard.
        """
        shards = sorted(
            shard for shard in self.topics if shard != topic and topic_of(shard) == topic
        )
        if not shards or topic in self.broken or not (yield from self._strays(topic, shards)):
            return
        yield Pause(RECHECK_S)
        for group, declaring in sorted((yield from self._strays(topic, shards)).items()):
            done: int | LisaError | None = None
            if self.repair and (yield from self.store.groups(topic)):
                withdraw = group_removal.withdraw(
                    self.store, Topic(topic), group, list(map(Shard, declaring))
                )
                done = yield from attempt(withdraw)
                if group in (yield from self.store.groups(topic)):
                    continue
            cure = "remove it from the topic, or add it there"
            if isinstance(done, int):
                cure = f"removed, {done} messages purged"
            what = f"declared in {', '.join(declaring)}; {cure}"
            finding = Finding(kind="stray-group", topic=topic, group=group, what=what)
            self.report.add(finding if done is None else finding.after(done))

    def _strays(self, topic: str, shards: list[str]) -> Flow[dict[str, list[str]]]:
        declaring: dict[str, list[str]] = {}
        for shard in shards:
            for group in (yield from self.store.groups(shard)):
                declaring.setdefault(group, []).append(shard)
        # Read last, because a group is declared in its topic first.
        known = yield from group_removal.being_removed(self.store, topic)
        known.update((yield from self.store.groups(topic)))
        return {group: found for group, found in declaring.items() if group not in known}

    def _undeclared(self, topic: str, group: str) -> Flow[None]:
        keys = self.store.keys.topic(topic).group(group)
        if not (yield from self._is_left(topic, group, keys)):
            return
        yield Pause(RECHECK_S)  # the group may just be removed and added again
        if not (yield from self._is_left(topic, group, keys)):
            return
        age_ms = yield from group_removal.age_ms(self.store, topic, group)
        owed = yield from group_removal.owed(self.store, topic, group)
        what = f"has {owed} unsettled messages; "
        repair: Flow[object]
        if age_ms is not None:
            what += "its removal was interrupted: "
            cure, cured, repair = "remove it again", "finished", self._finish(topic, group)
        elif owed:
            cure, cured = "declare it again, or remove it", "declared again"
            repair = self._declare(Declare(topic, group, only_lost=True))
        else:
            cure, cured, repair = "remove it", "its keys are deleted", self._drop_rest(topic, group)
        finding = Finding(kind="undeclared-group", topic=topic, group=group, what=what + cure)
        if (yield from self._add(finding, repair, what + cured)):
            self.undeclared[topic].discard(group)

    def _finish(self, topic: str, group: str) -> Flow[bool]:
        """Finish a removal; False if another process finished it or is working on it."""
        done = yield from group_removal.finish(
            self.store, Shard(topic), group, group_removal.ABANDONED_MS
        )
        return done is not None

    def _declare(self, declare: Declare) -> Flow[bool]:
        """Declare a group, or mend its stream; False if a command removed it meanwhile."""
        yield from self.store.run(declare)
        return declare.group in (yield from self.store.groups(declare.topic))

    def _drop_rest(self, topic: str, group: str) -> Flow[bool]:
        """Delete the keys; False if the group was declared or is being worked on."""
        return (yield from self.store.run(Undeclare(topic, group, rest=True))).gone

    def _is_left(self, topic: str, group: str, keys: GroupKeys) -> Flow[bool]:
        """Whether an undeclared group has keys and no process is working on them."""
        age_ms = yield from group_removal.age_ms(self.store, topic, group)
        found, declared, mark, still = yield from self.store.commands(
            [
                ("EXISTS", *keys),
                ("HEXISTS", self.store.keys.topic(topic).groups, group),
                group_removal.mark_command(self.store, topic, group),
                ("EXISTS", *keys),
            ]
        )
        is_worked_on = mark is not None and (age_ms is None or age_ms < group_removal.ABANDONED_MS)
        return bool(found and still) and not declared and not is_worked_on

    def bodies(self) -> Flow[None]:
        """Check every live message."""
        keys = self.store.keys
        patterns = [keys.bodies_pattern()]
        if self.named:
            patterns = [keys.topic(topic).bodies_pattern() for topic in sorted(self.topics)]
        for pattern in patterns:
            cursor = None
            while cursor != START:
                cursor, names = yield from scan_keys(self.store, pattern, cursor or START)
                by_topic = grouped(found for name in names if (found := self._id_of(name)))
                for topic, ids in by_topic.items():
                    if not (self.named or (yield from self._is_checked(topic))):
                        continue
                    self.report.bodies += len(ids)
                    yield from self._check_ids(topic, self._readable(topic, None, ids))

    def _is_checked(self, topic: str) -> Flow[bool]:
        """Whether to check this topic's bodies; checks the key types of a new topic."""
        if topic not in self.topics and topic not in self.broken:
            yield from self._check_types(topic)
            if topic not in self.broken:
                self.topics.add(topic)
        return topic in self.topics

    def _id_of(self, name: bytes) -> tuple[str, bytes] | None:
        key = name.decode("utf-8", "surrogateescape")
        topic = self.store.keys.shard_of(key)
        if topic is None:
            return None
        one = self.store.keys.topic(topic).id_of_body(key)
        return topic, one.encode("utf-8", "surrogateescape")

    def records(self, topic: str) -> Flow[None]:
        """Page through all records that name ids of a topic, and check ids without a body."""
        keys = self.store.keys.topic(topic)
        yield from self._named_by(topic, None, "ZSCAN", keys.waiting)
        yield from self._named_by(topic, None, "HSCAN", keys.policy)
        yield from self._named_by(topic, None, "ZSCAN", keys.expiry)
        for group in (yield from self.store.groups(topic)):
            own = keys.group(group)
            for command, key in (
                ("HSCAN", own.entries),
                ("HSCAN", keys.lanes(group).parked),
                ("ZSCAN", own.retry),
                ("ZSCAN", own.garbage),
                ("HSCAN", own.attempts),
                ("HSCAN", own.reasons),
                ("ZSCAN", own.leases),
            ):
                yield from self._named_by(topic, group, command, key)

    def _named_by(self, topic: str, group: str | None, command: str, key: str) -> Flow[None]:
        keys, cursor = self.store.keys.topic(topic), None
        while cursor != START:
            cursor, members = yield from member_page(self.store, command, key, cursor or START)
            self.report.records += len(members)
            for part in chunks(self._readable(topic, group, members), EXISTS_PER_CALL):
                # `bodies` checks live ids; one EXISTS shows whether there are others.
                live = yield from self.store.command("EXISTS", *map(keys.body, part))
                if live < len(part):
                    yield from self._check_ids(topic, part, only="no-body")

    def _readable(self, topic: str, group: str | None, ids: Sequence[bytes]) -> list[str]:
        names, foreign = readable(ids)
        for message_id in foreign:
            what = f"{message_id[:80]!r}: not an id of a message; remove it manually"
            self.report.add(Finding(kind="bad-id", topic=topic, group=group, what=what))
        return names

    def _check_ids(self, topic: str, ids: Sequence[str], only: str = "") -> Flow[None]:
        """Report the findings about ids and repair them if enabled. `only`: one kind."""
        size = max(1, self.store.batch_size(topic) // CALLS_PER_BATCH)
        for part in chunks(ids, size):
            wrong = yield from self._findings(topic, part)
            lost = [message_id for message_id, kinds in wrong.items() if "no-place" in kinds]
            if lost:
                for message_id in (yield from self._owed_elsewhere(topic, lost)):
                    del wrong[message_id]
            if only:
                wrong = {message_id: kinds for message_id, kinds in wrong.items() if only in kinds}
            mended: list[list[str]] | LisaError = []
            if self.repair and wrong:
                mended = yield from attempt(self.store.run(Mend(topic, list(wrong))))
                if not isinstance(mended, LisaError):
                    # Report the repair's own findings: an id may have changed since.
                    wrong = dict(zip(wrong, mended, strict=True))
            for message_id, kinds in wrong.items():
                for kind in dict.fromkeys(kinds):
                    finding = Finding(kind=kind, topic=topic, id=message_id)
                    self.report.add(finding.after(mended) if self.repair else finding)

    def _findings(self, topic: str, ids: Sequence[str]) -> Flow[dict[str, list[str]]]:
        found = yield from self.store.run(Mend(topic, ids, judge=True))
        return {message_id: kinds for message_id, kinds in zip(ids, found, strict=True) if kinds}

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
                for message_id in ids
                for command in (
                    ("HEXISTS", own.entries, message_id),
                    ("HEXISTS", keys.lanes(group).parked, message_id),
                    ("ZSCORE", own.retry, message_id),
                    ("ZSCORE", own.garbage, message_id),
                )
            ]
            replies = yield from self.store.commands(asked)
            owed |= {one for i, one in enumerate(ids) if any(replies[4 * i : 4 * i + 4])}
        rest = [message_id for message_id in ids if message_id not in owed]
        if rest:
            # A removal that was running at the first check may have settled them by now.
            again = yield from self._findings(topic, rest)
            owed |= {
                message_id for message_id in rest if "no-place" not in again.get(message_id, ())
            }
        return owed

    def streams(self, topic: str) -> Flow[None]:
        """Check the entries of the ready streams of all groups of a topic."""
        for group in (yield from self.store.groups(topic)):
            keys = self.store.keys.topic(topic).group(group)
            if (yield from self._finds_group(keys.ready, group)):
                yield from self._entries(topic, group, keys)
                yield from self._pending(topic, group, keys)

    def _missing_streams(self, topic: str) -> Flow[None]:
        """Find declared groups without a stream, skipping groups that are undeclared meanwhile."""
        for group in (yield from self.store.groups(topic)):
            stream = self.store.keys.topic(topic).group(group).ready
            if (yield from self._finds_group(stream, group)):
                continue
            declared = group in (yield from self.store.groups(topic))
            if not declared or (yield from self._finds_group(stream, group)):
                continue
            finding = Finding(kind="no-stream", topic=topic, group=group)
            yield from self._add(finding, self._declare(Declare(topic, group, only_mend=True)))

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
        away = [("XACK", keys.ready, group, entry), ("XDEL", keys.ready, entry)]
        yield from self._add(finding, self.store.commands(away))

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
        yield from self._add(finding, self.store.command("XACK", keys.ready, group, entry))

    def lanes(self, topic: str) -> Flow[None]:
        """Check the counts of all lanes of a topic.

        What plain reads find is only suspected: a script that moves messages may run between them.
        """
        for group in (yield from self.store.groups(topic)):
            keys = self.store.keys.topic(topic)
            counted = yield from self._slots(keys.group(group).entries)
            cursor = None
            while cursor != START:
                cursor, page = yield from self._lane_page(keys.lanes(group).lanes, cursor or START)
                places = yield from self._places(keys.lanes(group).queues, list(page))
                suspects = [
                    key
                    for (key, (used, parked)), queued in zip(page.items(), places, strict=True)
                    if (used, parked) != (counted.pop(key, 0), queued)
                ]
                yield from self._recount(topic, group, suspects)
            yield from self._recount(topic, group, list(counted))

    def _slots(self, entries: str) -> Flow[Counter[str]]:
        """How many ready messages and messages in flight each key has."""
        found: Counter[str] = Counter()
        cursor = None
        while cursor != START:
            cursor, members = yield from member_page(self.store, "HSCAN", entries, cursor or START)
            found.update(key_of(message_id) or "" for message_id in readable(members)[0])
        return found

    def _lane_page(
        self, lanes: str, cursor: bytes
    ) -> Flow[tuple[bytes, dict[str, tuple[int, int]]]]:
        """The next cursor, and slots and parked messages of lanes by key."""
        following, fields = yield from self.store.command("HSCAN", lanes, cursor, "COUNT", PAGE)
        found = {}
        for key, lane in zip(fields[::2], fields[1::2], strict=True):
            used, parked, *_ = lane.split(b" ", 2)
            if not key.startswith(KEY_END.encode()):
                found[key.decode("utf-8", "replace")] = (int(used), int(parked))
        return following, found

    def _places(self, queues: str, lanes: Sequence[str]) -> Flow[list[int]]:
        """How many messages are parked in each lane."""
        return (
            yield from self.store.commands(
                [("ZLEXCOUNT", queues, f"[{key}{KEY_END}", f"({key} ") for key in lanes]
            )
        )

    def _recount(self, topic: str, group: str, lanes: Sequence[str]) -> Flow[None]:
        for part in chunks(lanes, PAGE):
            wrong = yield from self.store.run(Recount(topic, group, part, judge=not self.repair))
            for key in wrong:
                name = f"lane of key {key!r}" if key else "lane of the messages without a key"
                finding = Finding(kind="miscounted", topic=topic, group=group, what=name)
                self.report.add(replace(finding, repaired=self.repair))

    def unregistered(self) -> Flow[None]:
        """Find topics with messages that are not registered, so that managers skip them."""
        suspects = yield from self._unknown(sorted(self.topics))
        if not suspects:
            return
        # A sweeper that unregisters a topic checks it again at once and may register it.
        yield Pause(RECHECK_S)
        for topic in (yield from self._unknown(suspects)):
            finding = Finding(kind="unregistered", topic=topic)
            yield from self._add(finding, self.store.list_again([topic]))

    def _unknown(self, topics: list[str]) -> Flow[list[str]]:
        found = []
        for topic in topics:
            known = yield from self.store.command("ZSCORE", self.store.keys.topics, topic)
            if known is None and (yield from self._holds_messages(topic)):
                found.append(topic)
        return found

    def _holds_messages(self, topic: str) -> Flow[bool]:
        keys = self.store.keys.topic(topic)
        if (yield from self.store.command("ZCARD", keys.waiting)):
            return True
        for group in (yield from self.store.groups(topic)):
            if (yield from group_removal.owed(self.store, topic, group)):
                return True
        return False
