"""A topic's counts as server-sent events; all clients of a topic share one query per second."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from lisa.admin import live
from lisa.core.model.errors import LisaError
from lisa.gateway.api.operations import NO_TOPIC, TOPIC, Call, Operations, Reply
from lisa.gateway.api.topics import Activity, counts_fields, require_topic
from lisa.gateway.api.types import NoFields
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import disconnected

LOOK_EVERY_S = 1.0
HEARTBEAT_S = 10.0

_encoder = msgspec.json.Encoder()


operations = Operations("Topics")


@operations.add(
    "watchTopic",
    "GET",
    f"{TOPIC}/events",
    media_type="text/event-stream",
    answers={200: "A stream that ends when the gateway stops."},
    problems=NO_TOPIC,
)
async def watch(call: Call[NoFields, None]) -> Reply[Activity]:
    """Watch a topic.

    Server-sent events named `counts` with an Activity as data: the first immediately, then at most
    one per second, when something changes.
    """
    await require_topic(call.gateway, call.topic)
    return _Stream(call.gateway, call.request, call.topic)


_feeds: dict[tuple[GatewayContext, str], _Feed] = {}


def _join(gateway: GatewayContext, topic: str) -> _Feed:
    """The feed of a topic, started for its first client."""
    feed = _feeds.get((gateway, topic))
    if feed is None or feed.task.done():
        feed = _feeds[gateway, topic] = _Feed(gateway, topic)
    feed.watchers += 1
    return feed


def _leave(feed: _Feed) -> None:
    """Remove one client; the feed ends with its last client."""
    feed.watchers -= 1
    if not feed.watchers:
        feed.task.cancel()
        if _feeds.get((feed.gateway, feed.topic)) is feed:
            del _feeds[feed.gateway, feed.topic]


class _Feed:
    """Reads one topic's counts; `event` is the latest event and `number` its sequence number."""

    def __init__(self, gateway: GatewayContext, topic: str) -> None:
        self.topic = topic
        self.watchers = 0
        self.number = 0
        self.event = b""
        self.gateway = gateway
        self._news = asyncio.Event()
        self.task = gateway.run_task(self._run(), f"the events of {topic}")

    async def news(self, after: int) -> None:
        """Wait for an event after number `after`, a heartbeat interval, or the end of the feed."""
        if self.number > after or self.task.done():
            return
        waiting = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait(
                {waiting, self.task}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()

    async def _run(self) -> None:
        before: live.TopicsSnapshot | None = None
        shown: dict[str, Any] = {}
        while not self.gateway.broker.is_closing:
            with suppress(LisaError):  # an unreachable server is tried again
                now = await self.gateway.ask(live.look, [self.topic])
                fields = _fields(before or now, now)
                before = now
                if fields != shown:
                    shown = fields
                    self._publish(Activity(**fields, at_ms=now.at_us // 1000))
            await asyncio.sleep(LOOK_EVERY_S)

    def _publish(self, activity: Activity) -> None:
        self.number += 1
        self.event = b"event: counts\ndata: " + _encoder.encode(activity) + b"\n\n"
        self._news.set()
        self._news = asyncio.Event()


def _fields(before: live.TopicsSnapshot, now: live.TopicsSnapshot) -> dict[str, Any]:
    ((topic, interval),) = live.activity(before, now).items()
    return {
        **counts_fields(now.topics[topic]),
        "in_per_s": round(interval.per_s("sent"), 1),
        "out_per_s": round(interval.per_s("acked"), 1),
        "retried_per_s": round(interval.per_s("retried"), 1),
        "garbage_per_s": round(interval.per_s("garbage"), 1),
        "lateness_p50_ms": interval.lateness_ms(0.5),
        "lateness_p99_ms": interval.lateness_ms(0.99),
    }


class _Stream(Reply[Activity]):
    """A streaming response; a slow client skips events instead of buffering them."""

    media_type = "text/event-stream"

    def __init__(self, gateway: GatewayContext, request: Request, topic: str) -> None:
        super().__init__(b"")
        del self.headers["content-length"]
        self._gateway = gateway
        self._request = request
        self._topic = topic

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the gateway stops."""
        with self._gateway.shares.waiting(self._gateway.shares.streams):
            await self._run(send)

    async def _run(self, send: Send) -> None:
        feed = _join(self._gateway, self._topic)
        departure = asyncio.create_task(disconnected(self._request))
        sending = asyncio.create_task(self._send(feed, send))
        try:
            await asyncio.wait({departure, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (departure, sending):
                task.cancel()
            await asyncio.gather(departure, sending, return_exceptions=True)
            _leave(feed)

    async def _send(self, feed: _Feed, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": self.raw_headers,
            }
        )
        await send(_piece(b"retry: 2000\n\n"))
        sent = 0
        while not feed.task.done():
            await feed.news(sent)
            if feed.number > sent:
                sent = feed.number
                await send(_piece(feed.event))
            else:
                await send(_piece(b": still here\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
