"""Whether a history is valid: the answers about each message, and what is left of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lisa.admin import fsck
from lisa.core.model.keys import TopicKeys
from lisa.core.redis.flow import Flow, Pause, Step, drive
from lisa.core.store import group_removal
from lisa.core.store.store import SyncStore
from lisa.core.transitions.enqueue import Sent
from tests.model import lanes
from tests.model.acting import ALL, FAR, consumer, declarer, finisher, manager
from tests.model.interleaving import TOPIC, Event, Moment, answered, pairs

T = TypeVar("T")
ROUNDS = 12
ENDS = ("cancelled", "expired", "skipped")


class Judge:
    """Judges each state as if all roles were killed there and others finished the work."""

    def __init__(
        self, store: SyncStore, groups: Sequence[str], lanes: Mapping[str, str] | None = None
    ) -> None:
        """lanes: the topic's options of lanes; None if it has no lanes."""
        self._store = store
        self._lanes = lanes
        self._keys = store.keys.topic(TOPIC)
        self._groups = groups

    def __call__(self, moment: Moment) -> None:
        if all(role.call is None for role in moment.roles):
            report = drive(without_pauses(fsck.check(self._store)), self._store.connection)
            assert report.total == 0, report.findings
            assert not half_removed(self._keys, moment), "a removal is through, and has not ended"
        declared = check_groups(self._keys, self._groups, moment)
        check_places(self._keys, declared, moment)
        if self._lanes is not None:
            check_slots(lanes.read(self._store, declared))
        story = list(moment.history)
        if declared != set(self._groups):
            self._work(story)
            self._bring_back(story)
        for _ in range(ROUNDS):
            self._work(story)
            if not self._is_work_left():
                break
        self._check(story)
        if self._lanes and "order" in self._lanes:
            for group in self._groups:
                check_order(story, group)

    def witness(self, before: Moment, told: Sequence[Event]) -> None:
        """Check that the answers were true at that instant."""
        groups = declared_in(self._keys, before)
        for what, id_, *rest in told:
            holders = held_by(self._keys, groups, before, id_)
            over = is_settled_somewhere(self._keys, before, id_)
            garbages = [self._keys.group(group).garbage for group in groups]
            is_dead = any(id_.encode() in before.seen.get(key, ()) for key in garbages)
            is_leaving = id_.encode() in left_in(self._keys, before)
            truths = {
                "cancelled": not holders and over in ("", "cancelled"),
                "rescheduled": not holders and not over and not is_dead,
                "expired": [who for _, who in holders] == rest,  # no holder, or the role itself
                "skipped": not holders,
                "in_flight": bool(holders),
                "done": bool(over) or is_dead or is_leaving,
                "unknown": not over and self._keys.body(id_) not in before.seen,
                "kept": tuple(rest) in holders,
                "lost": tuple(rest) not in holders,
            }
            assert truths.get(what, True), f"{what} {id_} {rest}: {holders or over or is_dead}"

    def _work(self, story: list[Event]) -> None:
        for group in self._groups:
            self._store.drive(manager(group)(self._store, story))
            self._store.drive(consumer("last", group, most=10)(self._store, story))

    def _bring_back(self, story: list[Event]) -> None:
        """Finish interrupted removals, and declare the removed groups again."""
        for group in self._groups:
            for role in (finisher(group), declarer(group)):
                self._store.drive(role(self._store, story))

    def _is_work_left(self) -> bool:
        asked: list[tuple[str, ...]] = [("ZCOUNT", self._keys.waiting, "-inf", f"({FAR}")]
        for keys in map(self._keys.group, self._groups):
            asked += [("HLEN", keys.entries), ("ZCOUNT", keys.retry, "-inf", f"({FAR}")]
        asked += [("HLEN", self._keys.lanes(group).parked) for group in self._groups]
        return any(self._store.drive(self._store.commands(asked)))

    def _check(self, story: list[Event]) -> None:
        """Check how each message ended, and that nothing else is left of it."""
        lives = dict.fromkeys((e[1], e[2]) for e in story if is_new(e))
        ends = {id_: check_life(story, id_, token, self._groups) for id_, token in lives}
        asked: list[tuple[str, ...]] = []
        for id_ in ends:
            asked += [
                ("GET", self._keys.done(id_)),
                ("EXISTS", self._keys.body(id_)),
                ("ZSCORE", self._keys.waiting, id_),
            ]
        for keys in map(self._keys.group, self._groups):
            asked += [
                ("XLEN", keys.ready),
                ("EXISTS", keys.entries, keys.leases),
                ("ZCOUNT", keys.retry, "-inf", f"({FAR}"),
                ("ZRANGE", keys.garbage, "0", "-1"),
                ("ZRANGE", keys.retry, "0", "-1"),  # until a window opens
                ("HKEYS", keys.attempts),
            ]
        asked += [("HLEN", self._keys.lanes(group).parked) for group in self._groups]
        replies = self._store.drive(self._store.commands(asked))
        of_groups = replies[3 * len(ends) : -len(self._groups)]
        assert not any(replies[-len(self._groups) :]), "still parked at the end"
        kept = {one.decode() for some in of_groups[3::6] + of_groups[4::6] for one in some}
        left = of_groups[::6] + of_groups[1::6] + of_groups[2::6]
        assert not any(left), f"left in groups: {of_groups}"
        for number, (id_, end) in enumerate(ends.items()):
            stone, body, due = replies[3 * number : 3 * number + 3]
            is_live = end is None
            assert not is_live or due == FAR.encode() or id_ in kept, f"{id_} is lost"
            assert bool(body) == is_live, f"{id_} ended {end}, body {body}"
            said = (stone or b"").decode()[9:].partition(",")[0]
            assert said == (end or ""), f"{id_} ended {end}, its tombstone says {said!r}"
        live = {id_ for id_, end in ends.items() if end is None}
        failed = {one.decode() for some in of_groups[5::6] for one in some}
        assert failed <= live, f"failures are counted of what is not live: {failed - live}"


def declared_in(keys: TopicKeys, moment: Moment) -> set[str]:
    """The groups that are declared."""
    return {name.decode() for name in pairs(moment.seen.get(keys.groups, ()))}


def half_removed(keys: TopicKeys, moment: Moment) -> set[str]:
    """The groups whose removal has begun but not finished."""
    return group_removal.marked(pairs(moment.seen.get(keys.options, ())))


def held_by(
    keys: TopicKeys, groups: Iterable[str], moment: Moment, id_: str
) -> list[tuple[str, str]]:
    """The groups, and their consumers, that have a message in flight."""
    found = []
    for group in groups:
        stream = pairs(moment.seen.get(keys.group(group).ready, ()))
        own = pairs(moment.seen.get(keys.group(group).entries, ())).get(id_.encode())
        for of_group in map(pairs, stream.get(b"groups", ())):
            found += [
                (group, who.decode()) for entry, who, *_ in of_group[b"pending"] if entry == own
            ]
    return found


def is_settled_somewhere(keys: TopicKeys, moment: Moment, id_: str) -> str:
    """How a message ended; `partly` if one of several groups has settled it, else ''."""
    body = moment.seen.get(keys.body(id_))
    if body is not None:
        return "partly" if body[9:10] == b"+" or body[9:10].isupper() else ""
    stone: bytes = moment.seen.get(keys.done(id_), b"")
    return stone[9:].decode().partition(",")[0]


def check_groups(keys: TopicKeys, groups: Sequence[str], moment: Moment) -> set[str]:
    """Check that the right groups are declared and nothing is left of removed ones."""
    declared, half = declared_in(keys, moment), half_removed(keys, moment)
    told = after(moment.history, set(groups))
    assert declared == told, f"declared are {declared}, though {told} should be"
    assert not declared & half, f"declared, and being removed: {declared & half}"
    for group in set(groups) - declared - half:
        left = [key for key in keys.group(group) if key in moment.seen]
        assert not left, f"left of a group that was removed: {left}"
    return declared


def after(story: Sequence[Event], groups: set[str]) -> set[str]:
    """The declared groups after these events, given those declared before."""
    declared = set(groups)
    for what, _, *rest in story:
        if what == "declared":
            declared |= set(rest)
        elif what == "undeclared":
            declared -= set(rest)
    return declared


def check_places(keys: TopicKeys, declared: set[str], moment: Moment) -> None:
    """Check that each live message is waiting, or in one place of a group that owes it."""
    seen = moment.seen
    waiting = set(seen.get(keys.waiting, [])[::2])
    owed = set[bytes]()
    for group in declared:
        owed |= places_in(keys, group, moment)
    assert not owed & waiting, f"waiting, and owed: {owed & waiting}"
    live = {
        key.removeprefix(keys.body("")).encode() for key in seen if key.startswith(keys.body(""))
    }
    placed = owed | waiting
    # What a removal has not settled yet stays live, unless another group was the last to owe it.
    assert placed <= live <= placed | left_in(keys, moment), f"live {live}, placed {placed}"


def places_in(keys: TopicKeys, group: str, moment: Moment) -> set[bytes]:
    """The messages in a group's places, each in only one."""
    own = keys.group(group)
    places = [
        id_
        for key in (own.entries, own.retry, own.garbage, keys.lanes(group).parked)
        for id_ in moment.seen.get(key, [])[::2]
    ]
    assert len(set(places)) == len(places), f"in two places: {places}"
    return set(places)


def check_slots(seen: lanes.Snapshot) -> None:
    """Check each lane's slots, and that its counters are right."""
    for group in seen.groups.values():
        lanes.check_counts(group)
        lanes.check_slots(seen, group, group.entries)


LET_GO = ("cancelled", "rescheduled", "expired", "sent")
LET_GO_BY = ("settled", "dead", "purged")


def check_order(story: Sequence[Event], group: str) -> None:
    """Check that what a group has begun of a key was not overtaken until its end."""
    held: dict[str, str] = {}
    for what, id_, *rest in story:
        key, own_id = lanes.parts_of(id_)
        if what == "handed" and rest[1] == group:
            assert held.get(key, own_id) == own_id, f"{id_} overtook {held[key]}: {story}"
            held[key] = own_id
        elif held.get(key) == own_id and (what in LET_GO or (group in rest and what in LET_GO_BY)):
            del held[key]


def left_in(keys: TopicKeys, moment: Moment) -> set[bytes]:
    """The messages left in groups whose removal has begun but not finished."""
    places = (places_in(keys, group, moment) for group in half_removed(keys, moment))
    return set[bytes]().union(*places)


def check_life(story: Sequence[Event], id_: str, token: str, groups: Sequence[str]) -> str | None:
    """Follow one life of a message. Returns how it ended, or None if it is live."""
    about = [one for one in story if len(one) > 1 and one[1] in (id_, ALL)]
    begins = next(n for n, one in enumerate(about) if is_new(one) and one[2] == token)
    _, _, _, outcome, due = about[begins]
    # An update does not have its own due time.
    life = Life(
        after(about[:begins], set(groups)), is_far=due == FAR and outcome is not Sent.UPDATED
    )
    later = ((n, one) for n, one in enumerate(about) if n > begins and is_new(one))
    ends = [n for n, one in later if one[2] != token and one[3] is Sent.ACCEPTED]
    for event in about[begins : ends[0] if ends else None]:
        what = event[0]
        assert what != "unknown", "unknown, though it had been sent"
        if is_new(event) and event[2] != token:
            life.end = life.end or event[3]
        elif what in ENDS:
            life.ends(what)
        elif what == "rescheduled":
            life.moves(event[2])
        elif what in ("handed", "settled") and event[2] == token:
            life.happens(what, event[3])
        elif what == "purged":
            life.happens(what, event[2])
        elif what == "removed":
            life.is_removed(event[2])
        elif what == "declared":
            life.groups.add(event[2])
            life.later.add(event[2])
        elif what == "undeclared":
            life.groups.discard(event[2])
            life.later.discard(event[2])
    return life.end or life.last_settled()


def is_new(event: Event) -> bool:
    """Whether a message was sent as new, not merely repeated."""
    return event[0] == "sent" and event[3] not in (Sent.DUPLICATE, Sent.REJECTED)


REPLACED = (Sent.REPLACED, Sent.REPLACED_IN_FLIGHT, Sent.UPDATED)


@dataclass
class Life:
    """The state of a message's life."""

    groups: set[str]
    """The declared groups."""
    is_far: bool = False
    end: str | None = None
    settled: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    """Groups declared since it began: each owes it if it was promoted after that."""
    last: str | None = None

    def ends(self, what: str) -> None:
        """It was cancelled (a repeated cancel says so again), or expired."""
        if self.end not in REPLACED:
            assert self.end in (None, what), f"{what} after it was {self.end}"
            self.end = what

    def moves(self, due: str) -> None:
        assert self.end is None, f"rescheduled after it was {self.end}"
        self.is_far = due == FAR

    def happens(self, what: str, group: str) -> None:
        """It was delivered to a group's consumer, acked, or purged there."""
        # The consumer that held it may open it only now.
        if what != "handed" or self.end != Sent.REPLACED_IN_FLIGHT:
            assert self.end is None, f"{what} after it was {self.end}"
        assert group not in self.settled, f"{what} after it was settled"
        assert what != "handed" or not self.is_far, "handed out before its new due time"
        assert group in self.groups, f"{what} by a group that was removed"
        if what != "handed":
            self.settled.add(group)
            self.last = "acked" if what == "settled" else what
            if self.settled >= self.groups:
                self.end = self.last

    def is_removed(self, group: str) -> None:
        """A group's removal ended it."""
        assert group not in self.groups, "removed from a group that was declared anew"
        self.ends("purged")

    def last_settled(self) -> str | None:
        """How it ended if no later group owed it."""
        return self.last if self.settled >= self.groups - self.later else None


def without_pauses(flow: Flow[T]) -> Flow[T]:
    """The same flow without pauses: nothing else runs meanwhile."""

    def answer(step: Step) -> Flow[Any]:
        return None if isinstance(step, Pause) else (yield step)

    return answered(flow, answer)
