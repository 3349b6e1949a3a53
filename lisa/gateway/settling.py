"""What a client says of its deliveries; what arrives together goes to the server as one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lisa.core.envelope import fence_of
from lisa.core.errors import ConfigError
from lisa.core.keys import check_id, check_topic
from lisa.core.store import AsyncStore
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.base import ById
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Failed, Failure, Retried
from lisa.core.transitions.retry import Retry as Fail
from lisa.gateway.receipts import Receipt
from lisa.producer.gathering import Gathering

__all__ = ["Settler"]

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")

TRIES = 5
"""How often a delivery named by its id alone is looked up, while others take it over."""


class _Line(NamedTuple):
    topic: str
    group: str
    more: Any = None
    """The consumer and the ack timeout of an extension."""


class Settler:
    """Ack, retry, extend and release, by receipt, or by id alone as earlier systems do it."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._acks: Gathering[_Line, Settlement, Acked] = self._gathering(
            Ack, lambda line, items: Ack(line.topic, line.group, items)
        )
        self._fails: Gathering[_Line, Failure, Retried] = self._gathering(
            Fail, lambda line, items: Fail(line.topic, line.group, items)
        )
        self._extensions: Gathering[_Line, tuple[str, str], bool] = self._gathering(
            Extend, lambda line, items: Extend(line.topic, line.group, line.more[0], items,
                                               line.more[1])
        )  # fmt: skip
        self._releases: Gathering[_Line, tuple[str, str], bool] = self._gathering(
            Release, lambda line, items: Release(line.topic, line.group, items)
        )
        self._looks: Gathering[tuple[str, bool], str, Inspection] = self._gathering(
            Inspect, lambda key, ids: Inspect(key[0], ids, bodies=key[1])
        )

    def _gathering(
        self,
        kind: type[ById[R]],
        call: Callable[[K, Sequence[T]], ById[R]],
    ) -> Gathering[K, T, R]:
        async def work(key: K, items: Sequence[T], known: list[R | None]) -> None:
            found: list[R] = await self._store.call_by_id(call(key, items))
            known += found

        def count(key: K, items: Iterable[T]) -> int:
            topic: str = key[0]  # type: ignore[index]
            return sum(1 for _ in islice(items, self._store.batch_size(topic, kind)))

        return Gathering[K, T, R](work, count)

    async def ack(self, topic: str, receipt: Receipt) -> Acked:
        """It is handled: acked, late (its lease had ended), stale or repeated. Raises LisaError."""
        return await self._acks.call(_Line(topic, receipt.group), receipt.settlement)

    async def retry(
        self, topic: str, receipt: Receipt, *, reason: str, delay: int | str | None = None
    ) -> Retried:
        """It failed; `delay` in ms, by policy (None), or "discard". Raises LisaError."""
        one = receipt.settlement
        wait: Any = delay
        failure = Failure(one.id, one.entry, reason, wait, one.lateness)
        return await self._fails.call(_Line(topic, receipt.group), failure)

    async def extend(self, topic: str, receipt: Receipt, ack_timeout_ms: int | None = None) -> bool:
        """Its ack timeout begins anew; False: no longer held. Raises LisaError."""
        timeout = receipt.ack_timeout_ms if ack_timeout_ms is None else ack_timeout_ms
        line = _Line(topic, receipt.group, (receipt.consumer, timeout))
        return await self._extensions.call(line, receipt.settlement[:2])

    async def release(self, topic: str, receipt: Receipt) -> bool:
        """It goes back, no attempt counted; False: no longer held. Raises LisaError."""
        return await self._releases.call(_Line(topic, receipt.group), receipt.settlement[:2])

    async def look(self, topic: str, message_id: str, *, bodies: bool = True) -> Inspection:
        """Where an id stands, changing nothing. Raises LisaError."""
        return await self._looks.call((check_topic(topic), bodies), check_id(message_id))

    async def holder(self, topic: str, message_id: str, group: str | None = None) -> Receipt | None:
        """The delivery that holds an id now, in the group named or the topic's only one.

        None if it is not in flight. Raises ConfigError where the topic has several groups.
        """
        seen = await self.look(topic, message_id, bodies=False)
        held = [one for one in seen.places if one.state == "in_flight"
                and one.group == (group or one.group)]  # fmt: skip
        if len(held) > 1:
            names = ", ".join(one.group for one in held)
            raise ConfigError(f"message {message_id!r} is in flight in several groups: {names}")
        if not held:
            return None
        (place,) = held
        settlement = Settlement(
            message_id, place.entry or "", fence_of(seen.envelope), place.due_ms or 0,
            place.failed_attempts + 1,
        )  # fmt: skip
        return Receipt(place.group, place.consumer or "", settlement)

    async def ack_by_id(
        self, topic: str, message_id: str, group: str | None = None
    ) -> Acked | None:
        """Ack whichever delivery holds an id now; None if it is not in flight."""
        for _ in range(TRIES):
            receipt = await self.holder(topic, message_id, group)
            if receipt is None:
                return None
            outcome = await self.ack(topic, receipt)
            if outcome is not Acked.STALE:
                return outcome
        return Acked.STALE

    async def retry_by_id(
        self,
        topic: str,
        message_id: str,
        *,
        reason: str,
        delay: int | str | None = None,
        group: str | None = None,
    ) -> Retried | None:
        """The same for a delivery that failed."""
        for _ in range(TRIES):
            receipt = await self.holder(topic, message_id, group)
            if receipt is None:
                return None
            retried = await self.retry(topic, receipt, reason=reason, delay=delay)
            if retried.outcome is not Failed.STALE:
                return retried
        return retried

    async def finish(self) -> None:
        """Wait until all that was asked for has been sent."""
        for one in (self._acks, self._fails, self._extensions, self._releases, self._looks):
            await one.finish()
