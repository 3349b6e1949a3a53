"""The gateway's producer, which sends for HTTP clients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lisa.core.model.errors import LisaError
from lisa.core.model.keys import Keys, check_topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection
from lisa.core.store.batcher import Deadline
from lisa.core.store.store import AsyncStore
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.producer.calls import Single, combine, single
from lisa.producer.plan import Outgoing, SendPlan
from lisa.producer.producer import AsyncProducer
from lisa.producer.report import SendOutcome, SendReport

_PLAN = SendPlan()


class GatewayProducer(AsyncProducer):
    """A producer for the gateway: it reports outcomes instead of raising, and shares its store.

    `deadline`: when the current request stops waiting, in the event loop's time; None: never.
    """

    def __init__(self, address: Address, *, deadline: Deadline, **options: Any) -> None:
        super().__init__(address, **options)
        self._deadline = deadline

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> AsyncStore:
        return AsyncStore(AsyncConnection(address), keys, patience, who="gateway")

    @property
    def store(self) -> AsyncStore:
        """The store that this producer sends through."""
        return self._store

    async def offer(
        self,
        topic: str,
        message: Outgoing,
        on_duplicate: OnDuplicate | str = OnDuplicate.KEEP,
        token: str | None = None,
    ) -> SendOutcome:
        """Send one message, batched with concurrent sends. Returns its id and outcome.

        `token`: the send token. If it is that of an earlier send of the same id, this call repeats
        that send: it adds nothing and returns the same outcome. By default each send is another.

        Raises LisaError. A duplicate id is an outcome, not an error, even with "reject".
        """
        plan = SendPlan.of({"on_duplicate": on_duplicate}, None)
        one = single(plan, message)
        if token is None:
            return await self._drive(self._send_one(check_topic(topic), plan.on_duplicate, one))
        sent, error = await self.offer_many(topic, [one], plan.on_duplicate, token)
        if error is not None:
            raise error
        return sent[0]

    async def offer_many(
        self,
        topic: str,
        messages: Sequence[Single],
        on_duplicate: OnDuplicate,
        token: str | None = None,
    ) -> tuple[list[SendOutcome], LisaError | None]:
        """Send prepared messages, hundreds per script call; `token` as in `offer`.

        Returns the outcomes in order, and the error of a failed call, after which nothing was sent.
        """
        report = SendReport()
        try:
            await self._drive(
                self._enqueue(check_topic(topic), on_duplicate, combine(messages), report, token)
            )
        except LisaError as error:
            return list(report), error
        return list(report), None

    @staticmethod
    def prepare(message: Outgoing) -> Single:
        """Encode a message for `offer_many`. Raises InvalidMessage."""
        return single(_PLAN, message)
