"""What each role does, on the server and in the model, as a Hypothesis state machine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lisa.core.model.clock import OLDEST_DUE_MS
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.recurring.definition import Record, define
from lisa.core.model.stream import Entry as Read
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import OfGroup, Transition
from lisa.core.transitions.delivery import Limits, Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Declare, Forget, Undeclare
from lisa.core.transitions.lease import FIRST, Begun, Extend, Reclaim, Reclaimed, Release
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from lisa.core.transitions.topic import Configure
from lisa.core.transitions.upkeep import Expire, Trim
from tests.model import delivering, managing, operating, scheduling, sending
from tests.model.delivering import Receipt
from tests.model.draws import (
    FAR,
    HOUR,
    OCCURRENCES,
    OPTIONS,
    OVERLAPS,
    batches,
    consumers,
    groups,
    ids,
    leases,
    letters,
    made,
    outgoing,
    picks,
    policies,
    timeouts,
    topics,
)
from tests.model.scheduling import Change, Made
from tests.model.sending import Outgoing, Send
from tests.model.stage import Stage, check_places
from tests.model.topic import Entry, Group, Topic
from tests.model.unknowns import Clock
from tests.rows import Item, enqueue

DEFINITION = define("", {"every": "1h"})
WITH_RECEIPTS = precondition(lambda self: self.receipts)
WITH_GARBAGE = precondition(lambda self: self.dead())


class Machine(RuleBasedStateMachine):
    """All roles, on three topics: one group, two, and two with a journal."""

    url: ClassVar[str]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(self.url, self.seen)
        self.sent: list[tuple[str, Send]] = []
        self.taken: list[tuple[str, str, str, list[Entry]]] = []
        self.receipts: list[tuple[str, Receipt]] = []
        self.littered: set[str] = set()
        """Topics with foreign entries."""
        self.changes = 0
        """Of schedules."""

    @initialize(batch=batches, lease=leases, timeout=timeouts, policy=policies)
    def three_topics(
        self, batch: list[Outgoing], lease: int | None, timeout: str, policy: str
    ) -> None:
        self.stage.producer.get("plain", "a")  # the first read writes the layout's version
        for name, its_groups in (("plain", "g"), ("pair", "gh"), ("told", "gh")):
            self.stage.topic(name)
            options: dict[str, str | None] = {"ack_timeout": timeout, "retry_delays": policy}
            options |= {"journal": "1"} if name == "told" else {}
            self.configure(name, options, declared=False)
            for group in its_groups:
                self.declare(name, group)
            self._send(name, Send(self._token(), "keep", [Outgoing("a", "+0"), *batch]))
            self.take(name, "g", "c1", lease)

    def teardown(self) -> None:
        try:
            if not self.stage.has_failed:
                for topic in self.stage.topics.values():
                    for name in sorted(topic.all_groups.keys() - topic.declared.keys()):
                        left = topic.all_groups[name].ids
                        self._undeclare(topic.name, name, left, drop=True, begun=False)
                self.stage.check_with_fsck(sorted(self.stage.topics.keys() - self.littered))
        finally:
            self.stage.close()

    @invariant()
    def every_message_has_its_place(self) -> None:
        for topic in self.stage.topics.values():
            if topic.all_groups.keys() == topic.declared.keys():
                check_places(topic)

    def _ids(self, topic: str, picks: list[int], group: str | None = None) -> list[str]:
        """Ids for a call: mostly known ones of a topic, or dead ones of a group's garbage."""
        its = self.stage.topic(topic)
        known = [*its.live, *its.tombstones]
        if group is not None and group in its.all_groups:
            known = [*its.all_groups[group].garbage] or known
        known.append("unheard-of")
        return [known[pick % len(known)] for pick in picks]

    def _call_in_group(
        self,
        transition: Transition[Any],
        model: Callable[[Topic, Group, Clock], Any],
        read_answer: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        """Run a transition of one group, which must be declared."""
        assert isinstance(transition, OfGroup)
        topic, group = self.stage.topic(transition.topic), transition.group
        self.stage.call(
            transition,
            lambda clock: model(topic, self.stage.group(topic, group), clock),
            read_answer,
        )

    # Producers

    @rule(topic=topics, batch=batches, mode=st.sampled_from(OnDuplicate))
    def send(self, topic: str, batch: list[Outgoing], mode: OnDuplicate) -> None:
        self._send(topic, Send(self._token(), mode.value, batch))

    @rule(topic=topics, batch=batches)
    def send_new_ids(self, topic: str, batch: list[Outgoing]) -> None:
        token = self._token()
        renamed = [replace(one, id=f"{token}{n}") for n, one in enumerate(batch)]
        self._send(topic, Send(token, "keep", renamed, are_ids_new=True))

    @rule(topic=topics, one=outgoing)
    def schedule_by_a_job(self, topic: str, one: Outgoing) -> None:
        self._send(topic, Send("~" + self._token()[1:], "keep", [one]))

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 5))
    def repeat_a_send(self, pick: int) -> None:
        """Repeat a send whose reply was lost."""
        self._send(*self.sent[-1 - pick % len(self.sent)])

    def _token(self) -> str:
        return f"{len(self.sent):08d}"

    def _send(self, name: str, call: Send) -> None:
        self.sent.append((name, call))
        topic = self.stage.topic(name)
        items = [
            Item(one.id, one.due, encode_envelope(call.token, one.text), one.ttl, one.policy)
            for one in call.messages
        ]
        mode = OnDuplicate(call.mode)
        self.stage.call(
            enqueue(name, call.token, items, mode, are_ids_new=call.are_ids_new),
            lambda clock: sending.send(topic, call, clock),
        )

    @rule(topic=topics, ids=ids)
    def cancel(self, topic: str, ids: list[int]) -> None:
        producer, its, named = self.stage.producer, self.stage.topic(topic), self._ids(topic, ids)
        self.stage.step(
            "cancel",
            lambda: producer.cancel_many(topic, named),
            lambda clock: sending.cancel(its, named, clock),
            actor=producer._store.actor,
        )

    @rule(
        topic=topics,
        pick=st.integers(0, 9),
        due=st.sampled_from([int(FAR), OLDEST_DUE_MS, timedelta(hours=1)]),
    )
    def reschedule(self, topic: str, pick: int, due: int | timedelta | None) -> None:
        """`None` fires the message now."""
        producer, its = self.stage.producer, self.stage.topic(topic)
        (id_,) = self._ids(topic, [pick])

        def by_the_producer() -> str:
            if due is None:
                return producer.fire_now(topic, id_)
            if isinstance(due, timedelta):
                return producer.reschedule(topic, id_, delay=due)
            return producer.reschedule(topic, id_, at_ms=due)

        spec = "+" + HOUR if isinstance(due, timedelta) else "+0" if due is None else str(due)
        self.stage.step(
            "reschedule",
            lambda: [by_the_producer()],
            lambda clock: sending.reschedule(its, [(id_, spec)], clock),
            actor=producer._store.actor,
        )

    @rule(topic=topics, pick=st.integers(0, 9))
    def fire_now(self, topic: str, pick: int) -> None:
        self.reschedule(topic, pick, None)

    @rule(topic=topics, pick=st.integers(0, 9))
    def look(self, topic: str, pick: int) -> None:
        producer, its = self.stage.producer, self.stage.topic(topic)
        (id_,) = self._ids(topic, [pick])

        def get() -> tuple[str, int | None, int] | None:
            found = producer.get(topic, id_)
            return (found.state, found.due_ms, found.attempts) if found else None

        self.stage.step("get", get, lambda _: operating.look_up(its, id_), actor="")

    # Consumers

    @rule(topic=topics, group=groups, consumer=consumers, most=st.integers(1, 3), lease=leases)
    def pull(self, topic: str, group: str, consumer: str, most: int, lease: int | None) -> None:
        """Without opening the messages: the consumer died, or is slow."""
        names = self.stage.store.keys.topic(topic).consumers
        self.stage.stores[0].ask("HSET", names, consumer, "x")
        self.stage.topic(topic).alive[consumer] = "x"

        def model(its: Topic, group_of: Group, clock: Clock) -> list[Read]:
            taken = delivering.pull(its, group_of, clock, consumer=consumer, most=most, lease=lease)
            if taken:
                self.taken.append((topic, group, consumer, taken))
            return as_read(taken)

        pull = Pull(topic, group, consumer, most, lease)
        self._call_in_group(pull, model, lambda pulled: pulled.entries)

    @precondition(lambda self: self.taken)
    @rule(pick=st.integers(0, 3), lease=leases)
    def open(self, pick: int, lease: int | None) -> None:
        self._open(pick, lease, None)

    @precondition(lambda self: self.taken)
    @rule(pick=st.integers(0, 3))
    def open_outside_the_window(self, pick: int) -> None:
        self._open(pick, None, int(FAR))

    def _open(self, pick: int, lease: int | None, opens: int | None) -> None:
        topic, group, consumer, entries = self.taken[-1 - pick % len(self.taken)]

        def model(its: Topic, group_of: Group, clock: Clock) -> Any:
            if opens is None:
                opened = delivering.open_entries(its, group_of, entries, lease, clock)
            else:
                opened = delivering.open_outside(its, group_of, entries, opens, clock)
            for entry, one in zip(entries, opened, strict=True):
                if one:
                    receipt = Receipt(group, consumer, entry, one[0][1:10])
                    self.receipts.append((topic, receipt))
            return [(one and one[0], bool(one and one[1])) for one in opened]

        limits = None if opens is None else [Limits(0, opens)] * len(entries)
        self._call_in_group(
            Open(topic, group, as_read(entries), lease, limits=limits),
            model,
            lambda opened: [
                (data and data.decode(), past and data is not None)
                for data, past in zip(opened.envelopes, opened.past_ttl, strict=True)
            ],
        )

    @rule(topic=topics, group=groups, consumer=consumers, lease=leases)
    def take(self, topic: str, group: str, consumer: str, lease: int | None) -> None:
        """Pull and open, as a live consumer does."""
        before = len(self.taken)
        self.pull(topic, group, consumer, 3, lease)
        if len(self.taken) > before:
            self.open(0, lease)

    @rule(topic=topics, group=groups)
    def take_by_another(self, topic: str, group: str) -> None:
        self.take(topic, group, "c3", None)

    def _picked(self, picks: list[int]) -> tuple[str, str, list[Receipt]]:
        """Some receipts, new and old, of one topic and group."""
        recent = self.receipts[-8:]
        topic, first = recent[picks[0] % len(recent)]
        alike = [one for where, one in recent if (where, one.group) == (topic, first.group)]
        return topic, first.group, [first] + [alike[n % len(alike)] for n in picks[1:]]

    @WITH_RECEIPTS
    @rule(picks=picks, letter=letters, state=st.sampled_from(["acked", "acked", "expired"]))
    def ack(self, picks: list[int], letter: str, state: str) -> None:
        topic, group, receipts = self._picked(picks)
        lateness = letter * len(receipts)
        settlements = [
            Settlement(*one.pair, one.fence, int(one.entry.due), one.entry.attempt, letter)
            for one in receipts
        ]
        self._call_in_group(
            Ack(topic, group, settlements, state),
            lambda its, group_of, clock: delivering.ack(
                its, group_of, receipts, clock, lateness=lateness, state=state
            ),
        )

    @WITH_RECEIPTS
    @rule()
    def ack_the_latest(self) -> None:
        self.ack([len(self.receipts[-8:]) - 1], "c", "acked")

    @WITH_RECEIPTS
    @rule()
    def fail_the_latest(self) -> None:
        self.retry([len(self.receipts[-8:]) - 1], "c", None)

    @WITH_RECEIPTS
    @rule(picks=picks, letter=letters, delay=st.sampled_from([None, None, 0, int(HOUR), "discard"]))
    def retry(self, picks: list[int], letter: str, delay: Any) -> None:
        topic, group, receipts = self._picked(picks)
        lateness = letter * len(receipts)
        failed = [(one, delay) for one in receipts]
        self._call_in_group(
            Fail(topic, group, [Failure(*one.pair, "boom", delay, letter) for one in receipts]),
            lambda its, group_of, clock: delivering.retry(
                its, group_of, failed, clock, lateness=lateness
            ),
            lambda said: [tuple(one) for one in said],
        )

    @WITH_RECEIPTS
    @rule(picks=picks)
    def release(self, picks: list[int]) -> None:
        topic, group, receipts = self._picked(picks)
        self._call_in_group(
            Release(topic, group, [one.pair for one in receipts]),
            lambda its, group_of, clock: delivering.release(its, group_of, receipts, clock),
        )

    @WITH_RECEIPTS
    @rule(picks=picks, until=st.sampled_from(["delay", "no delay", "window", "open window"]))
    def defer(self, picks: list[int], until: str) -> None:
        topic, group, receipts = self._picked(picks)
        delay = {"delay": int(HOUR), "no delay": 0}.get(until)
        opens = int(FAR) if until == "window" else None
        more = (opens or 0, "", 0) if delay is None else (delay, "busy")
        self._call_in_group(
            Postpone(topic, group, [Deferral(*one.pair, *more) for one in receipts]),
            lambda its, group_of, clock: delivering.defer(
                its, group_of, receipts, clock, opens=opens, delay=delay
            ),
            lambda said: [tuple(one) for one in said],
        )

    @WITH_RECEIPTS
    @rule(picks=picks, consumer=consumers, lease=leases, begun=st.sampled_from([*Begun]))
    def extend(
        self, picks: list[int], consumer: str, lease: int | None, begun: Begun = Begun.NO
    ) -> None:
        topic, group, receipts = self._picked(picks)
        pairs = [one.pair for one in receipts]
        self._call_in_group(
            Extend(topic, group, consumer, pairs, lease, begun),
            lambda its, group_of, clock: delivering.extend(
                its, group_of, receipts, clock, consumer=consumer, lease=lease, begun=begun
            ),
        )

    # Managers

    @rule(topic=topics, limit=st.sampled_from([1, 2, 250]))
    def promote(self, topic: str, limit: int) -> None:
        """Promote, and expire the messages found past their ttl."""
        its = self.stage.topic(topic)
        expired: list[str] = []

        def model(clock: Clock) -> tuple[object, ...]:
            said = managing.promote(its, limit, clock)
            expired.extend(said.expired)
            self.seen["Promote: moved"] += said.moved
            self.seen["Promote: full"] += len(said.full)
            self.seen["Promote: expired"] += len(said.expired)
            return tuple(said)

        fields = attrgetter("moved", "full", "next_due_ms", "paused", "cut_short", "expired")
        self.stage.call(Promote(topic, limit), model, fields)
        if expired:
            self._expire(topic, expired)

    @rule(topic=topics)
    def promote_by_another(self, topic: str) -> None:
        """Several managers may run concurrently."""
        self.promote(topic, 500)

    @rule(topic=topics, ids=ids)
    def expire(self, topic: str, ids: list[int]) -> None:
        """Expire messages with a ttl, as the sweeper does."""
        with_ttl = list(self.stage.topic(topic).expiry)
        self._expire(topic, [with_ttl[n % len(with_ttl)] for n in ids if with_ttl] or ["none"])

    def _expire(self, topic: str, ids: list[str]) -> None:
        its = self.stage.topic(topic)
        newer = {OCCURRENCES[0]: OCCURRENCES[1:]}
        self.stage.call(
            Expire(topic, ids, [newer.get(one, ()) for one in ids]),
            lambda clock: managing.expire(its, ids, newer, clock),
        )

    @rule(topic=topics, group=groups, window=st.sampled_from([1, 2, 200]))
    def reclaim(self, topic: str, group: str, window: int) -> None:
        """Reclaim window after window, to the end."""
        cursors: list[Entry | None] = [None]

        def model(its: Topic, group_of: Group, clock: Clock) -> tuple[object, ...]:
            said = managing.reclaim(its, group_of, cursors[-1], window, clock)
            cursors.append(said.cursor)
            self.seen["Reclaim: cleared"] += said.cleared
            self.seen["Reclaim: returned"] += said.returned
            return said.moved, said.cleared, said.returned, said.cursor and f"({said.cursor.name}"

        def read_answer(said: Reclaimed) -> tuple[object, ...]:
            moved = [(one.id, one.due_ms, tuple(one.retried)) for one in said.moved]
            return moved, said.cleared, said.returned, said.cursor

        while True:
            start = f"({cursors[-1].name}" if cursors[-1] else FIRST
            calls = len(cursors)
            self._call_in_group(Reclaim(topic, group, start, "+", window), model, read_answer)
            if len(cursors) == calls or cursors[-1] is None:
                return

    @rule(topic=topics, group=groups)
    def reclaim_by_another(self, topic: str, group: str) -> None:
        self.reclaim(topic, group, 200)

    @rule(topic=topics, group=groups, names=st.lists(consumers, min_size=1, unique=True))
    def forget(self, topic: str, group: str, names: list[str]) -> None:
        self._call_in_group(
            Forget(topic, group, names, 0),
            lambda its, group_of, _: managing.forget(its, group_of, names),
        )

    @rule(topic=st.sampled_from(["pair", "pair", "told"]), group=groups)
    def trim(self, topic: str, group: str) -> None:
        self._call_in_group(
            Trim(topic, group),
            lambda its, group_of, _: managing.trim(its, group_of),
            lambda said: said.removed,
        )

    # Other programs

    @rule(group=groups, how=st.sampled_from(["unread", "held", "acknowledged"]), seen=st.booleans())
    def litter(self, group: str, how: str, *, seen: bool) -> None:
        """Another program adds a foreign entry to a ready stream; a manager may see it soon."""
        topic, ask = "pair", self.stage.store.ask
        its, ready = self.stage.topic(topic), self.stage.store.keys.topic(topic).group(group).ready
        if group not in its.declared or (how != "unread" and its.all_groups[group].unread):
            return
        self.littered.add(topic)

        def write() -> None:
            entry = ask("XADD", ready, "*", "id", "ghost", "due", 5)
            if how != "unread":
                ask("XREADGROUP", "GROUP", group, "stranger", "STREAMS", ready, ">")
            if how == "acknowledged":
                ask("XACK", ready, group, entry)

        def model(clock: Clock) -> None:
            its_group = its.all_groups[group]
            its_group.add(clock, "ghost", 5)
            entry = its_group.stream[-1]
            entry.is_ours = False
            if how != "unread":
                its_group.consumers.add("stranger")
                its_group.given = entry
            if how == "held":
                entry.holder, entry.since = "stranger", clock.written

        self.stage.step("litter", write, model, actor="")
        if seen:
            self.reclaim(topic, group, 200)
            self.trim(topic, group)

    # Operators

    @rule(topic=topics, group=groups)
    def declare(self, topic: str, group: str) -> None:
        its = self.stage.topic(topic)
        call = Declare(topic, group)
        self.stage.call(call, lambda clock: operating.declare(its, group, clock))

    @rule(topic=topics, group=groups, ids=ids, drop=st.booleans(), begun=st.booleans())
    def undeclare(self, topic: str, group: str, ids: list[int], *, drop: bool, begun: bool) -> None:
        """Remove one page, as an operator's command or its repetition does."""
        self._undeclare(topic, group, self._ids(topic, ids), drop=drop, begun=begun)

    def _undeclare(
        self, topic: str, group: str, ids: list[str], *, drop: bool, begun: bool
    ) -> None:
        its = self.stage.topic(topic)
        if group in its.all_groups:
            self.stage.call(
                Undeclare(topic, group, ids, drop, begun),
                lambda clock: operating.undeclare(its, group, ids, clock, drop=drop, begun=begun),
            )

    @rule(topic=topics, values=st.fixed_dictionaries({}, optional=OPTIONS), declared=st.booleans())
    def configure(self, topic: str, values: dict[str, str | None], *, declared: bool) -> None:
        its = self.stage.topic(topic)
        self.stage.call(
            Configure(topic, values, declared=declared),
            lambda _: operating.configure(its, values, declared=declared),
        )

    @WITH_GARBAGE
    @rule(pick=st.integers(0, 5), ids=ids)
    def requeue(self, pick: int, ids: list[int]) -> None:
        self._end_garbage(Requeue, operating.requeue, pick, ids)

    @WITH_GARBAGE
    @rule(pick=st.integers(0, 5), ids=ids)
    def purge(self, pick: int, ids: list[int]) -> None:
        self._end_garbage(Purge, operating.purge, pick, ids)

    def _end_garbage(
        self,
        kind: type[Requeue | Purge],
        model: Callable[[Topic, Group, list[str], Clock], list[bool]],
        pick: int,
        ids: list[int],
    ) -> None:
        topic, group = self.dead()[pick % len(self.dead())]
        named = self._ids(topic, ids, group)
        self._call_in_group(
            kind(topic, group, named),
            lambda its, group_of, clock: model(its, group_of, named, clock),
        )

    def dead(self) -> list[tuple[str, str]]:
        """Topics and groups with garbage."""
        topics = self.stage.topics.values()
        return [(one.name, group.name) for one in topics for group in one.groups if group.garbage]

    # Schedules: managers at ticks, and edits

    @rule(
        topic=topics,
        name=st.sampled_from("pq"),
        is_current=st.sampled_from([True, True, True, False]),
        creates=st.lists(made, max_size=2, unique_by=lambda one: one.id),
        drops=ids,
        earlier=ids,
        overlap=st.sampled_from(OVERLAPS),
        how=st.sampled_from(["ticks", "ticks", "drops", "swaps", "ends", "removes"]),
    )
    def change_a_schedule(
        self,
        topic: str,
        name: str,
        *,
        is_current: bool,
        creates: list[Made],
        drops: list[int],
        earlier: list[int],
        overlap: str,
        how: str,
    ) -> None:
        its = self.stage.topic(topic)
        self.changes += 1
        found = its.schedules.get(name, "").partition(" ")[0]
        tick = None if how in ("ends", "removes") else 1_000 * self.changes
        record, held = (
            Record(version=self.changes, tick=one, made_ms=1, definition=DEFINITION).encode()
            for one in (tick, int(FAR))
        )
        dropped = set(self._ids(topic, drops)) if how in ("drops", "swaps") else set()
        call = Change(
            name,
            found if is_current else "9.9.9",
            "" if how == "removes" else record.decode(),
            tick,
            f"s{self.changes:07d}",
            [] if how == "removes" else creates,
            sorted(dropped),
            sorted(set(self._ids(topic, earlier)) - dropped),
            overlap,
            held.decode(),
            int(FAR),
            swaps=how == "swaps",
        )
        envelope = encode_envelope(call.token, "")
        self.stage.call(
            Schedule(
                topic,
                name,
                call.fence,
                call.record.encode(),
                call.score,
                creates=[
                    NewOccurrence(one.id, one.due, envelope, one.ttl, one.policy)
                    for one in call.creates
                ],
                drops=call.drops,
                earlier=call.earlier,
                overlap=overlap,
                held=call.held.encode(),
                held_score=call.held_score,
                swaps=call.swaps,
            ),
            lambda clock: scheduling.change(its, call, clock),
            tuple,
        )


def as_read(entries: list[Entry]) -> list[Read]:
    """Entries as a consumer reads them."""
    return [
        Read(
            str(one.name),
            one.id,
            int(one.due),
            one.attempt,
            is_suspect=one.is_suspect,
        )
        for one in entries
    ]
