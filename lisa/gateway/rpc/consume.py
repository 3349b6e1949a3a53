"""The stream of one consumer: deliveries within its credit, settlements, and an orderly end.

A delivery that the client has neither started nor settled is released when the stream ends. The
gateway keeps a list of these deliveries and of nothing else: every receipt can be settled on any
stream or by a separate call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Send

from lisa.core.delivery.source import LOOK_AGAIN_S, MOST
from lisa.core.model.errors import ServerUnavailable
from lisa.gateway.access import Scope
from lisa.gateway.api import deliveries
from lisa.gateway.api.deliveries import PullRequest
from lisa.gateway.api.operations import Call
from lisa.gateway.api.types import MOST_ITEMS, NoFields, convert_fields, invalid
from lisa.gateway.context import COPIES, GatewayContext, arrival
from lisa.gateway.problems import ClientDisconnected, ErrorResponse, problem_of
from lisa.gateway.pulls import HandedOut
from lisa.gateway.rpc import lisa_pb2
from lisa.gateway.rpc.transport import EXCHANGE, Exchange, parse, problem, request_fields
from lisa.gateway.shares import current

T = TypeVar("T")

MOST_HELD = 1_000
"""Deliveries of one stream that may wait to be started or settled, whatever the credit."""

ANSWER_BYTES = 1024 * 1024
"""Maximum bytes of bodies in one message to the client, unless a single body is larger.

gRPC clients refuse messages above 4 MiB by default.
"""

CLOSE_S = 1.0
"""How long a client may take, once the gateway stops, to say which deliveries it has started."""

WAIT_S = 60.0
"""How long one pull for a stream waits before the next one takes its place."""

_OPERATIONS = {operation.name: operation for operation in deliveries.operations}
_OUTCOMES = {"extend": "extended", "release": "released"}
"""The outcomes of actions whose answer has none."""


async def consume(gateway: GatewayContext, request: Request, send: Send) -> None:
    """Serve a stream until one side ends it. May raise ErrorResponse, ClientDisconnected."""
    current.get().is_pull = True
    message = await request.receive()  # the limits middleware has buffered it
    first = parse(lisa_pb2.ConsumeRequest, message["body"])
    if not first.HasField("open"):
        raise invalid("the first request of a stream must contain open")
    topic, opened = first.open.topic, request_fields(first.open)
    token = gateway.require(request, Scope.CONSUME, topic)
    opened.pop("topic", None)
    wanted = convert_fields("open", opened, PullRequest)
    with gateway.shares.waiting(gateway.shares.polls):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        call = Call(gateway, request, token, {"topic": topic}, NoFields(), wanted)
        await _Stream(call, request.scope[EXCHANGE]).run(first)


class _Stream:
    """One open stream: a reader, a sender of deliveries, and a settler.

    The settler handles everything read since its last round in one round, so that settlements
    share script calls and keep their order.
    """

    def __init__(self, call: Call[NoFields, PullRequest], exchange: Exchange) -> None:
        self._call = call
        self._gateway = call.gateway
        self._exchange = exchange
        self._credit = 0
        self._held: dict[str, HandedOut] = {}  # by receipt, neither started nor settled
        self._has_room = asyncio.Event()
        self._settlements: list[lisa_pb2.Settlement] = []
        self._is_read = False
        self._has_settlements = asyncio.Event()
        self._has_settled = asyncio.Event()
        self._writing = asyncio.Lock()
        self._failure: Exception | None = None  # of a write of results
        self._reading: asyncio.Task[None]

    async def run(self, first: lisa_pb2.ConsumeRequest) -> None:
        """Serve the stream until the client ends its requests or the gateway stops.

        If the stream breaks, the library cancels this call, possibly while it ends.
        """
        self._accept(first)
        reading = self._reading = _start(self._read())
        delivering = _start(self._deliver())
        stopping = _start(self._gateway.stopping.wait())
        # Settles what was read even if this call is cancelled.
        settling = self._gateway.run_task(self._settle(), f"settlements of {self._call.topic}")
        try:
            await asyncio.wait({reading, delivering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._gateway.stopping.is_set() and not reading.done():
                delivering.cancel()
                await self._close(reading)
        finally:
            for task in (reading, delivering, stopping):
                task.cancel()
            self._release()
            self._is_read = True
            self._has_settlements.set()
        await asyncio.wait({reading, delivering, settling})
        async with self._writing:  # let a write that has begun finish before the status
            pass
        for task in (reading, delivering):
            if not task.cancelled():
                task.result()
        if self._failure is not None:
            raise self._failure
        if self._gateway.stopping.is_set():
            raise ErrorResponse(503, "stopping", "the gateway stops")

    async def _close(self, reading: asyncio.Task[None]) -> None:
        """Tell the client that the gateway stops, and wait until the client ends its requests."""
        await self._write(lisa_pb2.ConsumeAnswer(closing=True))
        grace_s = self._gateway.settings.gateway_server.grace.total_seconds()
        await asyncio.wait({reading}, timeout=min(CLOSE_S, grace_s))
        self._release()
        await asyncio.wait({reading}, timeout=max(0.0, grace_s - CLOSE_S))

    def _release(self) -> None:
        self._gateway.broker.give_back(self._held.values())
        self._held.clear()

    async def _read(self) -> None:
        while (data := await self._exchange.read()) is not None:
            request = parse(lisa_pb2.ConsumeRequest, data)
            if request.HasField("open"):
                raise invalid("only the first request of a stream may contain open")
            self._accept(request)
            while len(self._settlements) > MOST_ITEMS:  # the client waits, by HTTP/2 flow control
                self._has_settled.clear()
                await self._has_settled.wait()

    def _accept(self, request: lisa_pb2.ConsumeRequest) -> None:
        if len(request.settlements) > MOST_ITEMS:
            raise invalid(f"a request may contain at most {MOST_ITEMS} settlements")
        self._credit += request.credit
        for receipt in (
            *request.started,
            *(settlement.receipt for settlement in request.settlements),
        ):
            self._held.pop(receipt, None)
        self._settlements += request.settlements
        if request.settlements:
            self._has_settlements.set()
        self._has_room.set()

    async def _deliver(self) -> None:
        call, wanted = self._call, self._call.body
        while True:
            most = min(self._credit, MOST, MOST_HELD - len(self._held))
            if most <= 0:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            try:
                found = await self._gateway.broker.pull(
                    call.topic,
                    group=wanted.group,
                    most=most,
                    wait_s=WAIT_S,
                    ack_timeout_ms=wanted.ack_timeout_ms,
                    may_declare=call.token.allows(Scope.OPERATE, call.topic),
                )
            except ServerUnavailable:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            self._credit -= len(found)
            self._held |= {delivery.receipt_text: delivery for delivery in found}
            for portion in _portions(found):
                await self._write(lisa_pb2.ConsumeAnswer(deliveries=map(_delivery, portion)))
            if not found and self._gateway.broker.is_closing:
                return

    async def _settle(self) -> None:
        while self._settlements or not self._is_read:
            await self._has_settlements.wait()
            self._has_settlements.clear()
            settlements, self._settlements = self._settlements, []
            self._has_settled.set()
            if settlements:
                settled = await asyncio.gather(*map(self._settle_one, settlements))
                await self._report(settled)

    async def _report(self, settled: list[lisa_pb2.Settled]) -> None:
        """Send results; if that fails, let the stream end."""
        if self._failure is None:
            try:
                await self._write(lisa_pb2.ConsumeAnswer(settled=settled))
            except (ClientDisconnected, ErrorResponse) as error:
                self._failure = error
                self._reading.cancel()

    async def _settle_one(self, settlement: lisa_pb2.Settlement) -> lisa_pb2.Settled:
        arrival.set((asyncio.current_task(), asyncio.get_running_loop().time()))
        receipt, action = settlement.receipt, settlement.WhichOneof("action")
        try:
            if action is None:
                raise invalid("the settlement of a receipt contains no action")
            operation = _OPERATIONS[f"{action}Message"]
            fields = {"receipt": receipt, **request_fields(getattr(settlement, action))}
            body = convert_fields("the settlement", fields, operation.body)
            answer: Any = await operation.handler(replace(self._call, body=body))
        except Exception as error:  # noqa: BLE001  answered as a problem
            found = problem(problem_of(error).content)
            return lisa_pb2.Settled(receipt=receipt, outcome="failed", problem=found)
        outcome = _OUTCOMES.get(action) or answer.outcome
        return lisa_pb2.Settled(
            receipt=receipt, outcome=outcome, due_ms=getattr(answer, "due_ms", None)
        )

    async def _write(self, answer: lisa_pb2.ConsumeAnswer) -> None:
        # Shielded: after a cancelled write, a gRPC call takes no further messages.
        await asyncio.shield(self._write_in_turn(answer))

    async def _write_in_turn(self, answer: lisa_pb2.ConsumeAnswer) -> None:
        size = COPIES * answer.ByteSize()
        with self._gateway.shares.buffered.taken(current.get().client, size):
            async with self._writing:
                await self._exchange.write(answer)


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task whose error is not logged, even if the call never retrieves it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


def _portions(found: Sequence[HandedOut]) -> Iterable[list[HandedOut]]:
    """Divide deliveries among messages of limited size."""
    portion: list[HandedOut] = []
    size = 0
    for delivery in found:
        if portion and size + delivery.size > ANSWER_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(delivery)
        size += delivery.size
    if portion:
        yield portion


def _delivery(handed_out: HandedOut) -> lisa_pb2.DeliveryAnswer:
    message = handed_out.message
    is_binary = isinstance(message.body, bytes)
    return lisa_pb2.DeliveryAnswer(
        id=message.id,
        key=message.key,
        receipt=handed_out.receipt_text,
        attempt=message.attempt,
        due_ms=message.due_ms,
        headers=message.headers,
        body_bytes=message.body if is_binary else None,
        body_json=None if is_binary else msgspec.json.encode(message.body).decode(),
    )
