"""What producers do, on the server and in the model."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from lisa.core.model.clock import OLDEST_DUE_MS
from lisa.core.model.envelope import encode_envelope
from lisa.core.transitions.enqueue import OnDuplicate
from tests.model import operating, sending
from tests.model.draws import FAR, HOUR, batches, ids, outgoing, topics
from tests.model.play import Play
from tests.model.sending import Outgoing, Send
from tests.rows import Item, enqueue


class Producers(Play):
    """Rules for producers."""

    @rule(topic=topics, batch=batches, mode=st.sampled_from(OnDuplicate))
    def send(self, topic: str, batch: list[Outgoing], mode: OnDuplicate) -> None:
        self._send(topic, Send(self._token(), mode.value, batch))

    @rule(topic=topics, batch=batches)
    def send_new_ids(self, topic: str, batch: list[Outgoing]) -> None:
        token = self._token()
        made = [
            Outgoing(f"{token}{n}", one.due, one.text, one.ttl, one.policy)
            for n, one in enumerate(batch)
        ]
        self._send(topic, Send(token, "keep", made, are_ids_new=True))

    @rule(topic=topics, one=outgoing)
    def schedule_by_a_job(self, topic: str, one: Outgoing) -> None:
        self._send(topic, Send("~" + self._token()[1:], "keep", [one]))

    @precondition(lambda self: self.sent)
    @rule(pick=st.integers(0, 5))
    def repeat_a_send(self, pick: int) -> None:
        """Repeat a send whose reply was lost."""
        topic, call = self.sent[-1 - pick % len(self.sent)]
        self._send(topic, call)

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
        items = [(id_, spec)]
        self.stage.step(
            "reschedule",
            lambda: [by_the_producer()],
            lambda clock: sending.reschedule(its, items, clock),
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
