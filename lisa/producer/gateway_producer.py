"""The gateway's producer, which sends for HTTP clients."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lisa.core.model.errors import LisaError, NotReplicated, ServerUnavailable
from lisa.core.model.keys import Keys, check_topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection
from lisa.core.redis.flow import Flow, adrive
from lisa.core.store.batcher import Deadline
from lisa.core.store.store import AsyncStore
from lisa.core.transitions.coalesce import is_rule
from lisa.core.transitions.enqueue import OnDuplicate, SendOutcome
from lisa.producer.calls import Single, single
from lisa.producer.plan import Outgoing, SendPlan
from lisa.producer.producer import AsyncProducer

T = TypeVar("T")

_PLAN = SendPlan()


class GatewayStore(AsyncStore):
    """A store whose flows fail if the server does not reply for the time that a request waits.

    The time-outs of connecting and of reading, and repeated calls, may together take longer.
    """

    reply_timeout: Callable[[], float | None] | None = None
    """How long the current caller waits for each reply, in seconds; None for no limit."""

    async def drive(self, flow: Flow[T]) -> T:
        """Run a flow on this store's connection. Raises LisaError."""
        timeout_s = None if self.reply_timeout is None else self.reply_timeout()
        if timeout_s is None:
            return await super().drive(flow)
        loop, within_s = asyncio.get_running_loop(), timeout_s
        limit = asyncio.timeout(within_s)
        try:
            async with limit:
                return await adrive(
                    flow, self.connection, lambda: limit.reschedule(loop.time() + within_s)
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServerUnavailable(f"the server did not reply within {within_s:g} s") from None


def _own_error(error: LisaError, index: int) -> LisaError:
    """The error of one message of a failed call, or of one after that call.

    `NotReplicated` names the message's id, because the message was written.
    """
    if not isinstance(error, NotReplicated):
        return error
    if index >= len(error.ids):
        return ServerUnavailable("not sent, because an earlier call was not confirmed in time")
    own = copy.copy(error)
    own.ids = (error.ids[index],)
    return own


class GatewayProducer(AsyncProducer):
    """A producer for the gateway: it reports outcomes instead of raising, and shares its store.

    `deadline`: when the current request stops waiting, in the event loop's time; None: never.
    `reply_timeout`: see `GatewayStore`.
    """

    _store: GatewayStore

    def __init__(
        self,
        address: Address,
        *,
        deadline: Deadline,
        reply_timeout: Callable[[], float | None],
        **options: Any,
    ) -> None:
        super().__init__(address, **options)
        self._deadline = deadline
        self._store.reply_timeout = reply_timeout

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> GatewayStore:
        return GatewayStore(AsyncConnection(address), keys, patience, who="gateway")

    @property
    def store(self) -> AsyncStore:
        """The store that this producer sends through."""
        return self._store

    async def offer(
        self,
        topic: str,
        message: Outgoing,
        on_duplicate: OnDuplicate = OnDuplicate.KEEP,
        token: str | None = None,
    ) -> SendOutcome:
        """Send one message, batched with concurrent sends. Returns its id and outcome.

        `token`: the send token. If it is that of an earlier send of the same id, this call repeats
        that send: it adds nothing and returns the same outcome. By default each send is another.

        Raises LisaError. A duplicate id is an outcome, not an error, even with "reject".
        """
        encoded = single(_PLAN, message)
        if is_rule(encoded.due):
            on_duplicate = OnDuplicate.UPDATE  # see SendPlan.of
        if token is None:
            return await self._sends.call((check_topic(topic), on_duplicate), encoded)
        (sent,) = await self.offer_many(topic, [encoded], on_duplicate, token)
        if isinstance(sent, LisaError):
            raise sent
        return sent

    async def offer_many(
        self,
        topic: str,
        messages: Sequence[Single],
        on_duplicate: OnDuplicate,
        token: str | None = None,
    ) -> list[SendOutcome | LisaError]:
        """Send prepared messages, hundreds per script call; `token` as in `offer`.

        Returns the outcome of each message, or the error of its call; a call that fails is the
        last. If only some shards refuse a call, the messages of the others have outcomes.
        """
        known: list[SendOutcome | None] = []
        try:
            await self._send_together((check_topic(topic), on_duplicate), messages, known, token)
        except LisaError as error:
            start = len(known) - len(error.outcomes)  # of the call that failed
            known += [None] * (len(messages) - len(known))
            return [one or _own_error(error, index - start) for index, one in enumerate(known)]
        return [outcome for outcome in known if outcome is not None]

    @staticmethod
    def prepare(message: Outgoing) -> Single:
        """Encode a message for `offer_many`. Raises InvalidMessage."""
        return single(_PLAN, message)
