"""What must hold of lanes after every call, judged from the server's data alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lisa.core.model.keys import COALESCED_IDS, keyed_id
from lisa.core.store.store import SyncStore
from tests.contract.bench import TOPIC

US = "\x1f"
LANE_OPTIONS = ("rate", "key_rate", "concurrency", "key_concurrency", "order", "fair", "slack")


def parts_of(message_id: str) -> tuple[str, str]:
    """The key of a message, empty if it has none, and its own id."""
    key, end, own = message_id.partition(US)
    return (key, own) if end else ("", message_id)


class Place(NamedTuple):
    """A message's place in its lane, in the order in which places sort."""

    latest_ms: int
    number: int
    cost: int
    due_ms: int

    @classmethod
    def read(cls, text: str) -> Place:
        return cls(int(text[:13]), int(text[13:23]), int(text[23:27]), int(text[27:40]))


@dataclass(frozen=True)
class Lane:
    """The stored state of a lane."""

    used: int
    parked: int
    rest_us: int = 0
    head: str = ""

    @classmethod
    def read(cls, text: str) -> Lane:
        used, parked, *more = text.split(" ", 6)
        return cls(int(used), int(parked), *((int(more[2]), more[4]) if more else ()))


@dataclass(frozen=True)
class Rules:
    """The options of lanes, as a group has them."""

    rate: tuple[int, int, int] | None
    key_rate: tuple[int, int, int] | None
    concurrency: int | None
    key_concurrency: int | None
    order: str
    fair: bool
    slack_ms: int

    @classmethod
    def read(cls, options: Mapping[str, str], group: str) -> Rules:
        values = {
            name: options.get(f"{name}@{group}", options.get(name, "")) for name in LANE_OPTIONS
        }
        return cls(
            rate_of(values["rate"]),
            rate_of(values["key_rate"]),
            int(values["concurrency"] or 0) or None,
            int(values["key_concurrency"] or 0) or None,
            values["order"],
            values["fair"] == "1",
            int(values["slack"] or 0),
        )


def rate_of(text: str) -> tuple[int, int, int] | None:
    """Messages, per milliseconds, and burst."""
    many, per_ms, burst = map(int, text.split(",")) if text else (0, 0, 0)
    return (many, per_ms, burst) if many else None


@dataclass
class Group:
    """One group's data."""

    name: str
    rules: Rules
    entries: dict[str, str]
    retry: dict[str, float]
    garbage: dict[str, float]
    stream: dict[str, str]
    dues: dict[str, int]
    parked: dict[str, Place]
    queued: list[tuple[str, Place]]
    turns: dict[str, float]
    closed: dict[str, float]
    lanes: dict[str, Lane]
    gate: str

    def used(self) -> Counter[str]:
        return Counter(parts_of(one)[0] for one in self.entries)

    def parked_by_key(self) -> Counter[str]:
        return Counter(parts_of(one)[0] for one in self.parked)

    def has(self, message_id: str) -> bool:
        return any(
            message_id in part for part in (self.entries, self.retry, self.garbage, self.parked)
        )


@dataclass
class Snapshot:
    """All data of the topic at one instant of the server's clock, in microseconds."""

    now_us: int
    options: dict[str, str]
    limits: dict[str, str]
    policies: dict[str, str]
    waiting: dict[str, float]
    live: set[str]
    groups: dict[str, Group]

    def limit_of(self, group: Group, key: str) -> tuple[int | None, tuple[int, int, int] | None]:
        """The concurrency and the rate of one key in a group."""
        if not key:
            return None, None
        most, rate = group.rules.key_concurrency, group.rules.key_rate
        for name in (key, f"{group.name}{US}{key}"):
            for part in filter(None, self.limits.get(name, "").split(";")):
                what, value = part.split("=")
                if what == "rate":
                    rate = rate_of(value)
                elif what == "concurrency":
                    most = int(value)
        return (1 if group.rules.order else most), rate

    def own_of(self, message_id: str) -> tuple[int, int | None, int]:
        """A message's own cost, slack and number of its send."""
        third = [*self.policies.get(message_id, "").split(";"), "", ""][2]
        cost, slack, number = [*third.split(","), "", ""][:3]
        return int(cost or 1), int(slack) if slack else None, int(number or 0)


def read(store: SyncStore, names: Iterable[str]) -> Snapshot:
    """Read all data of the topic."""
    keys = store.keys.topic(TOPIC)
    names = list(names)
    commands: list[Any] = [
        ("TIME",),
        ("HGETALL", keys.options),
        ("HGETALL", keys.limits),
        ("HGETALL", keys.policy),
        ("ZRANGE", keys.waiting, 0, -1, "WITHSCORES"),
        ("KEYS", keys.bodies_pattern()),
    ]
    for name in names:
        own, lanes = keys.group(name), keys.lanes(name)
        commands += [
            ("HGETALL", own.entries),
            ("ZRANGE", own.retry, 0, -1, "WITHSCORES"),
            ("ZRANGE", own.garbage, 0, -1, "WITHSCORES"),
            ("XRANGE", own.ready, "-", "+"),
            ("HGETALL", lanes.parked),
            ("ZRANGE", lanes.queues, 0, -1),
            ("ZRANGE", lanes.turns, 0, -1, "WITHSCORES"),
            ("ZRANGE", lanes.closed, 0, -1, "WITHSCORES"),
            ("HGETALL", lanes.lanes),
        ]
    time, options, *rest = store.drive(store.commands(commands))
    limits, policies, waiting, bodies, *parts = rest
    settings = texts(options)
    groups = {
        name: read_group(name, Rules.read(settings, name), parts[9 * n : 9 * n + 9])
        for n, name in enumerate(names)
    }
    return Snapshot(
        int(time[0]) * 1_000_000 + int(time[1]),
        settings,
        texts(limits),
        texts(policies),
        scores(waiting),
        {keys.id_of_body(body.decode()) for body in bodies},
        groups,
    )


def read_group(name: str, rules: Rules, replies: list[Any]) -> Group:
    entries, retry, garbage, stream, parked, queues, turns, closed, lanes = replies
    queued = []
    for member in queues:
        key, _, text = member.decode().partition(US)
        own = text[40:]
        queued.append((keyed_id(key, own) if key else own, Place.read(text)))
    stored = texts(lanes)
    gate = stored.pop(US + US, "16 0 0 0 0 ")
    stored.pop(US, None)
    return Group(
        name,
        rules,
        texts(entries),
        scores(retry),
        scores(garbage),
        {entry.decode(): fields[1].decode() for entry, fields in stream},
        {fields[1].decode(): int(fields[3]) for _, fields in stream},
        {one: Place.read(text) for one, text in texts(parked).items()},
        queued,
        scores(turns),
        scores(closed),
        {key: Lane.read(text) for key, text in stored.items()},
        gate,
    )


def texts(reply: Any) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in by_two(reply)}


def scores(reply: Any) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in by_two(reply)}


def by_two(reply: Any) -> list[tuple[Any, Any]]:
    return (
        list(reply.items())
        if isinstance(reply, dict)
        else list(zip(reply[::2], reply[1::2], strict=True))
    )


@dataclass
class Judge:
    """Compares each snapshot with the one before.

    heads: by group and key, the message that holds the lane since it failed.
    passed: by group and key, instants and costs of what was let through since the last change of
        rates; the key US is the group itself.
    """

    before: Snapshot
    heads: dict[tuple[str, str], str] = field(default_factory=dict)
    passed: dict[tuple[str, str], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def judge(self, after: Snapshot) -> None:
        """Check what must hold of a snapshot, and of the step to it."""
        changed = ("lanes_changed", "limits")
        if [self.before.options.get(one) for one in changed] != [
            after.options.get(one) for one in changed
        ] or after.now_us < self.before.now_us:
            self.passed.clear()
        check_places(after)
        for group in after.groups.values():
            was = self.before.groups[group.name]
            check_counts(group)
            self._check_limits(after, was, group)
            self._check_order(was, group)
            self._check_rates(after, was, group)
            self._follow_heads(was, group)
            self._check_turns(after, group)
        self.before = after

    def _check_limits(self, after: Snapshot, was: Group, group: Group) -> None:
        check_slots(after, group, group.entries.keys() - was.entries.keys())

    def _check_order(self, was: Group, group: Group) -> None:
        """What was parked in this step has its place, and what passed was the first of its lane."""
        for one in group.parked.keys() - was.parked.keys():
            assert group.parked[one][:2] == self._place(was, one)[:2], one
        if not group.rules.order:
            return
        for one in group.entries.keys() - was.entries.keys():
            key, own = parts_of(one)
            if not key:
                continue
            head = self._head(group, key)
            assert head in (None, own), f"{one} passed, but {head} holds the lane"
            mine = was.parked.get(one) or self._place(was, one)
            for other, place in group.parked.items():
                is_behind = parts_of(other)[0] != key or (mine[:2] <= place[:2])
                assert is_behind or head == own, f"{one} passed before {other}"

    def _place(self, was: Group, one: str) -> Place:
        """The place that a message gets when it is parked, by the data before."""
        key, own = parts_of(one)
        cost, slack, number = self.before.own_of(one)
        due = int(self.before.waiting.get(one, was.retry.get(one, was.dues.get(one, -1))))
        slack = was.rules.slack_ms if slack is None else slack
        is_resting = one in was.entries
        is_head = key and was.rules.order and (is_resting or self._head(was, key) == own)
        return Place(0 if is_head else max(0, due + slack), number, cost, due)

    def _check_rates(self, after: Snapshot, was: Group, group: Group) -> None:
        for one in group.entries.keys() - was.entries.keys():
            key, _ = parts_of(one)
            cost, _, _ = self.before.own_of(one)
            _, rate = after.limit_of(group, key)
            for lane, limit in ((key, rate), (US, group.rules.rate)):
                if limit is not None:
                    self._check_rate(self.passed[group.name, lane], limit, cost, after.now_us)

    def _check_rate(
        self, passed: list[tuple[int, int]], rate: tuple[int, int, int], cost: int, now_us: int
    ) -> None:
        many, per_ms, burst = rate
        passed.append((now_us, min(cost, burst)))
        total = 0
        for at, spent in reversed(passed):
            total += spent
            span_us = now_us - at + 1_000  # the clock is read before and after the call
            assert total <= burst + span_us * many / (per_ms * 1_000), f"{rate}: {passed}"

    def _head(self, group: Group, key: str) -> str | None:
        """The message that holds a lane now."""
        head = self.heads.get((group.name, key))
        whole = keyed_id(key, head or "")
        if head is None or not group.rules.order or not group.has(whole):
            return None
        return None if whole in group.garbage and group.rules.order == "continue" else head

    def _follow_heads(self, was: Group, group: Group) -> None:
        for one in was.entries.keys() - group.entries.keys():
            key, own = parts_of(one)
            dies = one in group.garbage and group.rules.order == "hold"
            if key and group.rules.order and (one in group.retry or one in group.parked or dies):
                stored = group.lanes[key].head  # the first of several that failed in one call
                self.heads.setdefault((group.name, key), stored or own)
        for (name, key), own in list(self.heads.items()):
            whole = keyed_id(key, own)
            if name == group.name and (whole in group.entries or not group.has(whole)):
                del self.heads[name, key]

    def _check_turns(self, after: Snapshot, group: Group) -> None:
        """A lane that may let a message through has a turn, or opens at an instant."""
        changed, _, again = group.gate.split(" ", 5)[3:]
        if changed != after.options.get("lanes_changed", "0") or again:
            return  # the next call of a manager looks at all lanes
        for key, parked in group.parked_by_key().items():
            used, (most, _) = group.used()[key], after.limit_of(group, key)
            head = self._head(group, key)
            is_held = head is not None and keyed_id(key, head) not in group.parked
            first = min(place for one, place in group.parked.items() if parts_of(one)[0] == key)
            is_coalesced = used > 0 and any(
                parts_of(one)[1] in COALESCED_IDS
                for one, place in group.parked.items()
                if parts_of(one)[0] == key and place == first
            )
            if is_held or is_coalesced or (most is not None and used >= most):
                continue
            assert key in group.turns or key in group.closed, f"{key!r}: {parked} are forgotten"


def check_places(after: Snapshot) -> None:
    """Each live message waits, or is in one place of each group that owes it; nothing else is."""
    owed: set[str] = set()
    for group in after.groups.values():
        places = [*group.entries, *group.retry, *group.garbage, *group.parked]
        assert len(places) == len(set(places)), f"in two places of {group.name}: {places}"
        assert not after.waiting.keys() & set(places), "waiting, and owed"
        owed |= set(places)
    assert owed | after.waiting.keys() == after.live


def check_slots(after: Snapshot, group: Group, new: Iterable[str]) -> None:
    """Entries that came since the limits were set are within these."""
    used, most_of_group = group.used(), group.rules.concurrency
    keys = {parts_of(one)[0] for one in new}
    for key in keys:
        most, _ = after.limit_of(group, key)
        assert most is None or used[key] <= most, f"{key}: {used[key]} slots of {most}"
        pair = {keyed_id(key, own) for own in COALESCED_IDS}
        assert not key or not pair <= group.entries.keys(), "two coalesced messages at once"
    if keys and most_of_group is not None:
        assert used.total() <= most_of_group, f"{used.total()} slots of {most_of_group}"


def check_counts(group: Group) -> None:
    """The counters of lanes agree with entries, parked and queues, the stream with its index."""
    assert {one: entry for entry, one in group.stream.items()} == group.entries
    used = {key: lane.used for key, lane in group.lanes.items() if lane.used}
    assert used == group.used(), f"used of {group.name}"
    parked = {key: lane.parked for key, lane in group.lanes.items() if lane.parked}
    assert parked == group.parked_by_key(), f"parked of {group.name}"
    assert dict(group.queued) == group.parked
    assert len(group.queued) == len(group.parked)
