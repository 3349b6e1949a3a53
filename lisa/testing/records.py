"""What the test kit and the recording producers remember of messages that were sent and handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from lisa.core.model.addresses import ServerUrl
from lisa.core.model.clock import ms_datetime
from lisa.core.model.envelope import decode_content
from lisa.core.model.lanes import cost_and_slack
from lisa.core.model.late import late_text, split_policy
from lisa.core.model.message import Message
from lisa.core.model.sharding import key_of, topic_of
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import found
from lisa.core.transitions.base import ById
from lisa.core.transitions.change import Reschedule
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, SendOutcome, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.producer.flows import Sending


class SentMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message that a producer sent.

    delay: the delay that was given, or the time of a debounce; None if the message was sent with
        `at` or `at_ms`.
    due: the due time, aware, UTC. A recording producer has no clock: None for a delay.
    ttl: the message's own ttl, or None.
    retry: the message's own retry policy as text, or None.
    late: its own late policy as text, or None.
    cost, slack: its own, or None.
    """

    id: str
    topic: str
    body: Any
    headers: dict[str, str]
    delay: timedelta | None
    due: datetime | None
    ttl: timedelta | None = None
    retry: str | None = None
    late: str | None = None
    cost: int | None = None
    slack: timedelta | None = None

    @property
    def key(self) -> str | None:
        """The key with which the message was sent, if any: the first part of its id."""
        return key_of(self.id)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to handle a message.

    at: when the handler ran, by the test's clock; aware, UTC.
    outcome: "handled"; "deferred"; "retrying" or "dead" after a failure; "stale" if the message was
        taken away while the handler ran.
    reason: why the attempt failed or was deferred, else "".
    """

    message: Message
    at: datetime
    outcome: str
    reason: str = ""


def sent_by(call: Enqueue, now_ms: int | None = None) -> Iterator[SentMessage]:
    """The messages of a call with the due times that were given for them, at `now_ms` if known."""
    count = len(call.ids)
    nothing = [None] * count
    columns = zip(
        call.ids,
        call.dues if len(call.dues) == count else [*call.dues] * count,
        call.envelopes,
        call.ttls_ms or nothing,
        call.policies or nothing,
        strict=True,
    )
    for message_id, due, envelope, ttl_ms, policy in columns:
        body, headers = decode_content(envelope)
        delay = delay_of(due)
        retry, late, lane = split_policy(policy)
        cost, slack = cost_and_slack(lane)
        due_ms = due if now_ms is None else dated(due, now_ms)
        yield SentMessage(
            id=message_id,
            topic=call.topic,
            body=body,
            headers=headers,
            delay=delay,
            due=None if due_ms.startswith("+") else ms_datetime(int(due_ms)),
            ttl=None if ttl_ms is None else timedelta(milliseconds=ttl_ms),
            retry=retry,
            late=late_text(late),
            cost=cost,
            slack=slack,
        )


def as_enqueue(call: Coalesce) -> Enqueue:
    """A call that sends the messages of a coalescing call, each for the time of its rule."""
    return Enqueue(
        call.topic,
        call.message_ids,
        [_due_of(rule) for rule in call.rules],
        call.envelopes,
        call.ttls_ms,
        call.policies,
    )


def _due_of(rule: str) -> str:
    if rule.startswith("l"):
        return rule[1:]
    return "+" + (rule[1:].partition(",")[0] if rule.startswith("d") else "0")


def delay_of(due: str) -> timedelta | None:
    """The delay of a due time for a script, '+<ms>' or epoch ms; None for the latter."""
    return timedelta(milliseconds=int(due[1:])) if due.startswith("+") else None


def dated(due: str, now_ms: int) -> str:
    """A due time for a script in epoch milliseconds; a delay counts from `now_ms`."""
    return str(now_ms + int(due[1:])) if due.startswith("+") else due


_write = Sending._write  # noqa: SLF001  the one method through which all producers write


class ProducerWatch:
    """Follows all producers of this process while it is active.

    The server's clock stands still only to the millisecond, and the end of a delay is rounded up.
    A delay is therefore replaced by the due time that it means at the test's clock, so that a test
    that advances by the same delay always reaches it.

    url, prefix: of the server to follow; calls to others are left alone.
    now_ms: the test's clock, in epoch milliseconds.
    just_before: while it is active, the server rounds its time up to that.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        now_ms: Callable[[], int],
        just_before: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._where = _server(url), prefix
        self._now_ms = now_ms
        self._just_before = just_before
        self.sent: list[SentMessage] = []
        self.topics: set[str] = set()

    def start(self) -> None:
        """Begin to follow."""
        watch = self

        def write(self: Sending, call: ById[Any], *, on_shard: bool = False) -> Flow[list[Any]]:
            return watch._follow(self, call, on_shard=on_shard)

        Sending._write = write  # type: ignore[method-assign]  # noqa: SLF001  as above

    def stop(self) -> None:
        """End, so that producers write as before."""
        Sending._write = _write  # type: ignore[method-assign]  # noqa: SLF001  as above

    def _follow(self, producer: Sending, call: ById[Any], *, on_shard: bool) -> Flow[list[Any]]:
        store = producer._store  # noqa: SLF001  a producer does not show its server
        if (_server(store.connection.address.url), store.keys.prefix) != self._where:
            return (yield from _write(producer, call, on_shard=on_shard))
        now_ms = self._now_ms()
        if isinstance(call, Reschedule):
            items = [(message_id, dated(due, now_ms)) for message_id, due in call.items]
            return (yield from _write(producer, replace(call, items=items), on_shard=on_shard))
        if isinstance(call, Coalesce):
            return (yield from self._follow_coalescing(producer, call))
        if not isinstance(call, Enqueue):
            return (yield from _write(producer, call, on_shard=on_shard))
        dues = [dated(due, now_ms) for due in call.dues]
        self.topics.add(topic_of(call.topic))
        outcomes = yield from _write(producer, replace(call, dues=dues))
        for message, outcome in zip(sent_by(call, now_ms), outcomes, strict=True):
            if outcome in (Sent.ACCEPTED, Sent.REPLACED):
                self.sent.append(message)
        return outcomes

    def _follow_coalescing(self, producer: Sending, call: Coalesce) -> Flow[list[SendOutcome]]:
        now_ms = self._now_ms()
        self.topics.add(topic_of(call.topic))
        rules = [f"l{dated(one[1:], now_ms)}" if one[0] == "l" else one for one in call.rules]
        with self._just_before():
            outcomes = yield from _write(producer, replace(call, rules=rules))
        ids = [outcome.id for outcome in outcomes]
        seen = yield from producer._store.run_by_id(Inspect(call.topic, ids))  # noqa: SLF001  as above
        for message, message_id, inspection in zip(
            sent_by(as_enqueue(call)), ids, seen, strict=True
        ):
            live = found(call.topic, message_id, inspection)
            due = live and live.due_ms and ms_datetime(live.due_ms)
            self.sent.append(msgspec.structs.replace(message, id=message_id, due=due))
        return outcomes


def _server(url: str) -> object:
    """The server and the database of a URL, which may be written in several ways."""
    parts = ServerUrl.parse(url)
    if parts.scheme != "redis" or parts.kind:
        return url
    ((host, port),) = parts.nodes
    return "127.0.0.1" if host == "localhost" else host, port, parts.path.strip("/") or "0"
