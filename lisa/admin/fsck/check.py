"""The whole check, in the order in which one finding explains the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lisa.admin.fsck.places import Places
from lisa.admin.fsck.report import Finding, Report, attempt
from lisa.admin.fsck.streams import Streams
from lisa.admin.reading import scan_keys
from lisa.core import removal
from lisa.core.errors import LisaError
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
    from them if the topic knows others, which are given the same messages. A repair that is refused
    is told with its finding, and the check goes on; only a server that does not answer, or takes no
    writes, ends it (ServerUnavailable). `found` hears of each finding as it is made, `progress` of
    the phase that begins.
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
            done: int | LisaError | None = None
            if self.repair and (yield from self.store.groups(topic)):
                done = yield from attempt(removal.withdraw(self.store, topic, group, places))
                if group in (yield from self.store.groups(topic)):
                    continue
            cure = "remove it from the topic, or add it there"
            if isinstance(done, int):
                cure = f"taken away, {done} messages purged"
            what = f"declared in {', '.join(places)}; {cure}"
            finding = Finding(kind="stray-group", topic=topic, group=group, what=what)
            self.report.add(finding if done is None else finding.after(done))

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
        if age_ms is not None:
            what, cures = "its removal was cut short: ", ("finished", "remove it again")
            repair = self._finish(topic, group)
        elif owed:
            what, cures = "", ("declared again", "declare it again, or remove it")
            repair = self._bring_back(topic, group)
        else:
            what, cures = "", ("its keys are gone", "remove it")
            repair = self._drop_rest(topic, group)
        done = (yield from attempt(repair)) if self.repair else None
        if done is False:
            return
        is_mended = self.repair and not isinstance(done, LisaError)
        if is_mended:
            self.places.undeclared[topic].discard(group)
        what = f"owes {owed} messages; {what}{cures[0 if is_mended else 1]}"
        finding = Finding(kind="undeclared-group", topic=topic, group=group, what=what)
        self.report.add(finding.after(done) if self.repair else finding)

    def _finish(self, topic: str, group: str) -> Flow[bool]:
        """False: somebody else did, or is at work on it."""
        done = yield from removal.finish(self.store, topic, group, removal.ABANDONED_MS)
        return done is not None

    def _bring_back(self, topic: str, group: str) -> Flow[bool]:
        """False: it was removed meanwhile, by a command."""
        yield from self.store.run(Declare(topic, group, only_lost=True))
        return group in (yield from self.store.groups(topic))

    def _drop_rest(self, topic: str, group: str) -> Flow[bool]:
        """False: it was declared meanwhile, or somebody is at work on it."""
        return (yield from self.store.run(Undeclare(topic, group, rest=True))).gone

    def _is_left(self, topic: str, group: str, keys: GroupKeys) -> Flow[bool]:
        """Whether keys stand there undeclared and nobody is at work on them."""
        age_ms = yield from removal.age_ms(self.store, topic, group)
        found, declared, mark, still = yield from self.store.commands([
            ("EXISTS", *keys), ("HEXISTS", self.store.keys.topic(topic).groups, group),
            removal.mark_command(self.store, topic, group), ("EXISTS", *keys),
        ])  # fmt: skip
        is_worked_on = mark is not None and (age_ms is None or age_ms < removal.ABANDONED_MS)
        return bool(found and still) and not declared and not is_worked_on

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
            if (yield from removal.owed(self.store, keys.group(group))):
                return True
        return False
