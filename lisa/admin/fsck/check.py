"""The whole check, in the order in which one finding explains the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lisa.admin.fsck.places import Places
from lisa.admin.fsck.report import Finding, Report
from lisa.admin.fsck.streams import Streams
from lisa.admin.reading import scan_keys
from lisa.core import removal
from lisa.core.flow import Flow, Pause
from lisa.core.keys import GROUP_KEYS, TOPIC_KEYS, GroupKeys, check_topic
from lisa.core.pages import START
from lisa.core.shards import base, bases
from lisa.core.store import Store
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.undeclare import Undeclare

__all__ = ["check"]

TOPIC_TYPES = dict(zip(TOPIC_KEYS, ("zset", "hash", "zset", *["hash"] * 4, "stream"), strict=True))
GROUP_TYPES = dict(
    zip(GROUP_KEYS, ("stream", "hash", "zset", "zset", "hash", "hash", "zset"), strict=True)
)

LOOK_AGAIN_S = 1.0


def check(
    store: Store,
    topics: Iterable[str] = (),
    *,
    repair: bool = False,
    found: Callable[[Finding], None] | None = None,
    progress: Callable[[str, Report], None] | None = None,
) -> Flow[Report]:
    """Check the topics named, or all that there are; mend what is wrong with `repair`.

    No repair loses a message: one without a place becomes due now, and a group whose declaration
    was lost is declared again rather than emptied. A group that only shards know of is taken away
    from them if the topic knows others, which are given the same messages. `found` hears of each
    finding as it is made, `progress` of the phase that begins.
    """
    run = _Check(store, Report(found), repair, tuple(map(check_topic, topics)))
    for phase, step in (
        ("keys", run.survey), ("groups", run.check_groups), ("messages", run.bodies),
        ("records", run.records), ("streams", run.streams), ("topics", run.unregistered),
    ):  # fmt: skip
        if progress is not None:
            progress(phase, run.report)
        yield from step()
    run.report.topics = bases(run.topics)
    return run.report


@dataclass(slots=True)
class _Check:
    store: Store
    report: Report
    repair: bool
    named: tuple[str, ...]
    topics: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    places: Places = field(init=False)
    in_streams: Streams = field(init=False)

    def __post_init__(self) -> None:
        self.places = Places(self.store, self.report, self.repair)
        self.in_streams = Streams(self.store, self.report, self.repair)

    def survey(self) -> Flow[None]:
        """Find topics and groups' keys; set topics apart whose keys are of another type."""
        self.topics = set((yield from self.store.places()))
        if self.named:
            self.topics = set()
            for layout, topic in zip(
                (yield from self.store.layouts(self.named)), self.named, strict=True
            ):
                self.topics.update(layout.counted(topic))
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
            self.places.undeclared[topic] = candidates.get(topic, set()) - set(declared)
        self.topics -= self.broken

    def _note(self, key: str, candidates: dict[str, set[str]]) -> None:
        topic = self.store.keys.topic_of(key)
        if topic is None or (self.named and base(topic) not in self.named):
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
        for (key, want), is_ in zip(wanted.items(), types, strict=True):
            if is_ not in (want.encode(), b"none"):
                what = f"{key} is a {is_.decode()}, not a {want}: rename or delete it by hand"
                self.report.add(Finding(kind="wrong-type", topic=topic, what=what))
                self.broken.add(topic)

    def check_groups(self) -> Flow[None]:
        """Keys of groups that are not declared, and declared groups without a stream.

        The former are a removal cut short, or a declaration lost. And groups that only shards know.
        """
        for topic in sorted(self.topics):
            yield from self.in_streams.missing(topic)
            for group in sorted(self.places.undeclared[topic]):
                yield from self._undeclared(topic, group)
        for topic in bases(self.topics):
            yield from self._stray(topic)

    def _stray(self, topic: str) -> Flow[None]:
        """Groups that shards declare, their topic does not, and no removal's mark explains.

        One was told to a shard by a process that died before it could take that back.
        """
        shards = sorted(one for one in self.topics if one != topic and base(one) == topic)
        if not shards or topic in self.broken or not (yield from self._strays(topic, shards)):
            return
        yield Pause(LOOK_AGAIN_S)
        for group, places in sorted((yield from self._strays(topic, shards)).items()):
            what = f"declared in {', '.join(places)}; "
            is_mended = self.repair and bool((yield from self.store.groups(topic)))
            if is_mended:
                settled = yield from removal.withdraw(self.store, topic, group, places)
                what += f"taken away, {settled} messages purged"
            else:
                what += "remove it from the topic, or add it there"
            self.report.add(
                Finding(kind="stray-group", topic=topic, group=group, what=what, repaired=is_mended)
            )

    def _strays(self, topic: str, shards: list[str]) -> Flow[dict[str, list[str]]]:
        places: dict[str, list[str]] = {}
        for shard in shards:
            for group in (yield from self.store.groups(shard)):
                places.setdefault(group, []).append(shard)
        # Asked last: a group is declared in its topic first.
        keys = self.store.keys.topic(topic)
        options = yield from self.store.command("HKEYS", keys.options)
        known = removal.marked(options).union((yield from self.store.groups(topic)))
        return {group: found for group, found in places.items() if group not in known}

    def _undeclared(self, topic: str, group: str) -> Flow[None]:
        keys = self.store.keys.topic(topic).group(group)
        if not (yield from self._is_left(topic, group, keys)):
            return
        yield Pause(LOOK_AGAIN_S)  # one that is removed and added again is not taken for a ruin
        if not (yield from self._is_left(topic, group, keys)):
            return
        age_ms = yield from removal.age_ms(self.store, topic, group)
        owed = yield from removal.owed(self.store, keys)
        what = f"owes {owed} messages; "
        if age_ms is not None:
            what += "its removal was cut short: " + self._cure("finished", "remove it again")
        elif owed:
            what += self._cure("declared again", "declare it again, or remove it")
        else:
            what += self._cure("its keys are gone", "remove it")
        if self.repair:
            if age_ms is not None:
                yield from removal.finish(self.store, topic, group, removal.ABANDONED_MS)
            elif owed:
                yield from self.store.run(Declare(topic, group))
            else:
                yield from self.store.run(Undeclare(topic, group, drop=True))
            self.places.undeclared[topic].discard(group)
        self.report.add(
            Finding(
                kind="undeclared-group", topic=topic, group=group, what=what, repaired=self.repair
            )
        )

    def _is_left(self, topic: str, group: str, keys: GroupKeys) -> Flow[bool]:
        """Whether keys stand there undeclared and nobody is at work on them."""
        age_ms = yield from removal.age_ms(self.store, topic, group)
        found, declared, mark, still = yield from self.store.commands([
            ("EXISTS", *keys), ("HEXISTS", self.store.keys.topic(topic).groups, group),
            removal.mark_command(self.store, topic, group), ("EXISTS", *keys),
        ])  # fmt: skip
        is_worked_on = mark is not None and (age_ms is None or age_ms < removal.ABANDONED_MS)
        return bool(found and still) and not declared and not is_worked_on

    def _cure(self, done: str, to_do: str) -> str:
        return done if self.repair else to_do

    def bodies(self) -> Flow[None]:
        """Judge every live message."""
        keys = self.store.keys
        patterns = [keys.bodies_pattern()]
        if self.named:
            patterns = [keys.topic(topic).bodies_pattern() for topic in sorted(self.topics)]
        for pattern in patterns:
            yield from self.places.bodies(pattern, None if self.named else self._is_checked)

    def _is_checked(self, topic: str) -> Flow[bool]:
        """Whether this topic's bodies are judged; one met for the first time is looked at."""
        if topic not in self.topics and topic not in self.broken:
            yield from self._check_types(topic)
            if topic not in self.broken:
                self.topics.add(topic)
        return topic in self.topics

    def records(self) -> Flow[None]:
        """Judge what names messages."""
        for topic in sorted(self.topics):
            yield from self.places.records(topic)

    def streams(self) -> Flow[None]:
        """Judge the entries of ready streams."""
        for topic in sorted(self.topics):
            yield from self.in_streams.check(topic)

    def unregistered(self) -> Flow[None]:
        """Topics that hold messages and that managers do not know of."""
        suspects = yield from self._unknown(sorted(self.topics))
        if not suspects:
            return
        # A sweeper that unregisters an idle topic looks again at once: so do we, a little later.
        yield Pause(LOOK_AGAIN_S)
        for topic in (yield from self._unknown(suspects)):
            if self.repair:
                yield from self.store.register([topic])
            self.report.add(Finding(kind="unregistered", topic=topic, repaired=self.repair))

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
            if (yield from removal.owed(self.store, keys.group(group))):
                return True
        return False
