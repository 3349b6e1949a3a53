"""What consumers do, on the server and in the model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from lisa.core.model.stream import Entry as Read
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.defer import Defer, Outside
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.open import Limits, Open
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Fail, Failure
from tests.model import delivering
from tests.model.delivering import Receipt
from tests.model.draws import FAR, HOUR, consumers, groups, leases, letters, picks, topics
from tests.model.play import Play
from tests.model.unknowns import Clock


class Consumers(Play):
    """Rules for consumers."""

    @rule(topic=topics, group=groups, consumer=consumers, most=st.integers(1, 3), lease=leases)
    def pull(self, topic: str, group: str, consumer: str, most: int, lease: int | None) -> None:
        """Without opening the messages: the consumer died, or is slow."""
        its = self.stage.topic(topic)
        self.stage.stores[0].ask(
            "HSET", self.stage.store.keys.topic(topic).consumers, consumer, "x"
        )
        its.alive[consumer] = "x"

        def model(clock: Clock) -> list[Read]:
            group_of = self.stage.group(its, group)
            taken = delivering.pull(its, group_of, clock, consumer=consumer, most=most, lease=lease)
            if taken:
                self.taken.append((topic, group, consumer, taken))
            return [Read(str(one.name), one.id, int(one.due), one.attempt) for one in taken]

        pull = Pull(topic, group, consumer, most, lease)
        self.stage.call(pull, model, lambda pulled: pulled.entries)

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
        its = self.stage.topic(topic)

        def model(clock: Clock) -> Any:
            group_of = self.stage.group(its, group)
            if opens is None:
                opened = delivering.open_entries(its, group_of, entries, lease, clock)
            else:
                opened = delivering.open_outside(its, group_of, entries, opens, clock)
            for entry, one in zip(entries, opened, strict=True):
                if one:
                    receipt = Receipt(group, consumer, entry, one[0][1:10])
                    self.receipts.append((topic, receipt))
            return [one and one[0] for one in opened], [bool(one and one[1]) for one in opened]

        reads = [Read(str(one.name), one.id, int(one.due), one.attempt) for one in entries]
        limits = None if opens is None else [Limits(0, opens)] * len(reads)
        self.stage.call(
            Open(topic, group, reads, lease, limits=limits),
            model,
            lambda opened: (
                [one and one.decode() for one in opened.envelopes],
                [
                    past and data is not None
                    for past, data in zip(opened.past_ttl, opened.envelopes, strict=True)
                ],
            ),
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

    @precondition(lambda self: self.receipts)
    @rule(picks=picks, letter=letters, state=st.sampled_from(["acked", "acked", "expired"]))
    def ack(self, picks: list[int], letter: str, state: str) -> None:
        topic, group, receipts = self._picked(picks)
        its = self.stage.topic(topic)
        settlements = [
            Settlement(
                one.id,
                str(one.entry.name),
                one.fence,
                int(one.entry.due),
                one.entry.attempt,
                letter,
            )
            for one in receipts
        ]
        self.stage.call(
            Ack(topic, group, settlements, state),
            lambda clock: delivering.ack(
                its,
                self.stage.group(its, group),
                receipts,
                clock,
                lateness=letter * len(receipts),
                state=state,
            ),
        )

    @precondition(lambda self: self.receipts)
    @rule()
    def ack_the_latest(self) -> None:
        self.ack([len(self.receipts[-8:]) - 1], "c", "acked")

    @precondition(lambda self: self.receipts)
    @rule()
    def fail_the_latest(self) -> None:
        self.retry([len(self.receipts[-8:]) - 1], "c", None)

    @precondition(lambda self: self.receipts)
    @rule(picks=picks, letter=letters, delay=st.sampled_from([None, None, 0, int(HOUR), "discard"]))
    def retry(self, picks: list[int], letter: str, delay: Any) -> None:
        topic, group, receipts = self._picked(picks)
        its = self.stage.topic(topic)
        failures = [Failure(one.id, str(one.entry.name), "boom", delay, letter) for one in receipts]
        self.stage.call(
            Fail(topic, group, failures),
            lambda clock: delivering.retry(
                its,
                self.stage.group(its, group),
                [(one, delay) for one in receipts],
                clock,
                lateness=letter * len(receipts),
            ),
            lambda said: [tuple(one) for one in said],
        )

    @precondition(lambda self: self.receipts)
    @rule(picks=picks)
    def release(self, picks: list[int]) -> None:
        topic, group, receipts = self._picked(picks)
        its = self.stage.topic(topic)
        self.stage.call(
            Release(topic, group, [(one.id, str(one.entry.name)) for one in receipts]),
            lambda clock: delivering.release(its, self.stage.group(its, group), receipts, clock),
        )

    @precondition(lambda self: self.receipts)
    @rule(picks=picks, is_closed=st.booleans())
    def defer(self, picks: list[int], is_closed: bool) -> None:  # noqa: FBT001 - drawn
        topic, group, receipts = self._picked(picks)
        its, opens = self.stage.topic(topic), int(FAR) if is_closed else 0
        outside = [Outside(one.id, str(one.entry.name), 0, opens) for one in receipts]
        self.stage.call(
            Defer(topic, group, outside),
            lambda clock: delivering.defer(
                its, self.stage.group(its, group), receipts, clock, opens
            ),
        )

    @precondition(lambda self: self.receipts)
    @rule(picks=picks, consumer=consumers, lease=leases)
    def extend(self, picks: list[int], consumer: str, lease: int | None) -> None:
        topic, group, receipts = self._picked(picks)
        its = self.stage.topic(topic)
        pairs = [(one.id, str(one.entry.name)) for one in receipts]
        self.stage.call(
            Extend(topic, group, consumer, pairs, lease),
            lambda clock: delivering.extend(
                its, self.stage.group(its, group), receipts, clock, consumer=consumer, lease=lease
            ),
        )
