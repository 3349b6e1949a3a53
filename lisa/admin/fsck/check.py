"""Runs all checks of fsck, ordered so that earlier repairs resolve later findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lisa.admin.fsck.ids import IdCheck
from lisa.admin.fsck.report import CheckReport, Finding, attempt
from lisa.admin.fsck.streams import StreamCheck
from lisa.admin.reading import scan_keys
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import GROUP_KEYS, TOPIC_KEYS, GroupKeys, check_topic
from lisa.core.model.sharding import Shard, Topic, topic_of, topics_of
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store import group_removal
from lisa.core.store.paging import START
from lisa.core.store.store import Store
from lisa.core.transitions.groups import Declare, Undeclare

TOPIC_TYPES = dict(zip(TOPIC_KEYS, ("zset", "hash", "zset", *["hash"] * 4, "stream"), strict=True))
GROUP_TYPES = dict(
    zip(GROUP_KEYS, ("stream", "hash", "zset", "zset", "hash", "hash", "zset"), strict=True)
)

RECHECK_S = 1.0


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
        ("records", run.records),
        ("streams", run.streams),
        ("topics", run.unregistered),
    ):
        if progress is not None:
            progress(phase, run.report)
        yield from step()
    run.report.topics = topics_of(run.topics)
    return run.report


@dataclass(slots=True)
class _Check:
    store: Store
    report: CheckReport
    repair: bool
    named: tuple[str, ...]
    topics: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    ids: IdCheck = field(init=False)
    stream_check: StreamCheck = field(init=False)

    def __post_init__(self) -> None:
        self.ids = IdCheck(self.store, self.report, self.repair)
        self.stream_check = StreamCheck(self.store, self.report, self.repair)

    def survey(self) -> Flow[None]:
        """Find topics and the keys of groups; exclude topics whose keys have a wrong type."""
        self.topics = set((yield from self.store.shards()))
        if self.named:
            self.topics = set()
            for layout, topic in zip(
                (yield from self.store.layouts(list(map(Topic, self.named)))),
                self.named,
                strict=True,
            ):
                self.topics.update(layout.counted(Topic(topic)))
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
            self.ids.undeclared[topic] = candidates.get(topic, set()) - set(declared)
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
        kind = yield from self.store.command("TYPE", keys.groups)
        if kind == b"hash":
            for group in (yield from self.store.groups(topic)):
                wanted |= dict(zip(keys.group(group), GROUP_TYPES.values(), strict=True))
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
            yield from self.stream_check.missing(topic)
            for group in sorted(self.ids.undeclared[topic]):
                yield from self._undeclared(topic, group)
        for topic in topics_of(self.topics):
            yield from self._stray(topic)

    def _stray(self, topic: str) -> Flow[None]:
        """Find groups that shards declare but their topic does not, unless one is being removed.

        They are left by a process that died before it could withdraw the group from a shard.
        """
        shards = sorted(one for one in self.topics if one != topic and topic_of(one) == topic)
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
        owed = yield from group_removal.owed(self.store, keys)
        if age_ms is not None:
            what, cures = "its removal was interrupted: ", ("finished", "remove it again")
            repair = self._finish(topic, group)
        elif owed:
            what, cures = "", ("declared again", "declare it again, or remove it")
            repair = self._bring_back(topic, group)
        else:
            what, cures = "", ("its keys are deleted", "remove it")
            repair = self._drop_rest(topic, group)
        done = (yield from attempt(repair)) if self.repair else None
        if done is False:
            return
        is_repaired = self.repair and not isinstance(done, LisaError)
        if is_repaired:
            self.ids.undeclared[topic].discard(group)
        what = f"has {owed} unsettled messages; {what}{cures[0 if is_repaired else 1]}"
        finding = Finding(kind="undeclared-group", topic=topic, group=group, what=what)
        self.report.add(finding.after(done) if self.repair else finding)

    def _finish(self, topic: str, group: str) -> Flow[bool]:
        """Finish a removal; False if another process finished it or is working on it."""
        done = yield from group_removal.finish(
            self.store, Shard(topic), group, group_removal.ABANDONED_MS
        )
        return done is not None

    def _bring_back(self, topic: str, group: str) -> Flow[bool]:
        """Declare a group again; False if a command removed it meanwhile."""
        yield from self.store.run(Declare(topic, group, only_lost=True))
        return group in (yield from self.store.groups(topic))

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
            yield from self.ids.bodies(pattern, None if self.named else self._is_checked)

    def _is_checked(self, topic: str) -> Flow[bool]:
        """Whether to check this topic's bodies; checks the key types of a new topic."""
        if topic not in self.topics and topic not in self.broken:
            yield from self._check_types(topic)
            if topic not in self.broken:
                self.topics.add(topic)
        return topic in self.topics

    def records(self) -> Flow[None]:
        """Check all records that name messages."""
        for topic in sorted(self.topics):
            yield from self.ids.records(topic)

    def streams(self) -> Flow[None]:
        """Check the entries of ready streams."""
        for topic in sorted(self.topics):
            yield from self.stream_check.check(topic)

    def unregistered(self) -> Flow[None]:
        """Find topics with messages that are not registered, so that managers skip them."""
        suspects = yield from self._unknown(sorted(self.topics))
        if not suspects:
            return
        # A sweeper that unregisters a topic checks it again at once and may register it.
        yield Pause(RECHECK_S)
        for topic in (yield from self._unknown(suspects)):
            finding = Finding(kind="unregistered", topic=topic)
            if self.repair:
                finding = finding.after((yield from attempt(self.store.register([topic]))))
            self.report.add(finding)

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
            if (yield from group_removal.owed(self.store, keys.group(group))):
                return True
        return False
