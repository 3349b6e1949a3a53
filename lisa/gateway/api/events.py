"""A topic's counts as server-sent events; all clients of a topic share one query per second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import convert
from msgspec.structs import asdict
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lisa.admin import live
from lisa.core.model.errors import LisaError
from lisa.gateway.api.operations import NO_TOPIC, TOPIC, Call, Operations, Reply
from lisa.gateway.api.topics import Activity, TopicCounts, require_topic
from lisa.gateway.api.types import NoFields
from lisa.gateway.context import GatewayContext

LOOK_EVERY_S = 1.0
HEARTBEAT_S = 10.0

_encoder = msgspec.json.Encoder()


operations = Operations("Topics")


@operations.add(
    "GET",
    f"{TOPIC}/events",
    "A stream that ends when the gateway stops.",
    media_type="text/event-stream",
    problems=NO_TOPIC,
)
async def watch_topic(call: Call[NoFields, None]) -> Reply[Activity]:
    """Watch a topic.

    Server-sent events named `counts` with an Activity as data: the first immediately, then at most
    one per second, when something changes.
    """
    await require_topic(call.gateway, call.topic)
    return _Stream(call.gateway, call.topic)


_feeds: dict[tuple[GatewayContext, str], _Feed] = {}


def _join(gateway: GatewayContext, topic: str) -> _Feed:
    """The feed of a topic, started for its first client."""
    feed = _feeds.get((gateway, topic))
    if feed is None or feed.is_over:
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
        self.is_over = False
        self.gateway = gateway
        self._news = asyncio.Event()
        self.task = gateway.run_task(self._run(), f"the events of {topic}")

    async def news(self, after: int) -> None:
        """Wait for an event after number `after`, a heartbeat interval, or the end of the feed."""
        if self.number <= after and not self.is_over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)

    async def _run(self) -> None:
        try:
            await self._follow()
        finally:
            self.is_over = True
            self._news.set()

    async def _follow(self) -> None:
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
        **asdict(convert(now.topics[topic], TopicCounts, from_attributes=True)),
        "in_per_s": round(interval.per_s("sent"), 1),
        "out_per_s": round(interval.per_s("acked"), 1),
        "retried_per_s": round(interval.per_s("retried"), 1),
        "garbage_per_s": round(interval.per_s("garbage"), 1),
        "lateness_p50_ms": interval.lateness_ms(0.5),
        "lateness_p99_ms": interval.lateness_ms(0.99),
    }


class _Stream(StreamingResponse, Reply[Activity]):
    """A streaming response; a slow client skips events instead of buffering them."""

    def __init__(self, gateway: GatewayContext, topic: str) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        self._gateway = gateway
        self._topic = topic
        self._feed: _Feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or the gateway stops."""
        with self._gateway.shares.waiting(self._gateway.shares.streams):
            self._feed = _join(self._gateway, self._topic)
            try:
                await super().__call__(scope, receive, send)
            finally:
                _leave(self._feed)

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        sent = 0
        while not self._feed.is_over:
            await self._feed.news(sent)
            if self._feed.number > sent:
                sent = self._feed.number
                yield self._feed.event
            else:
                yield b": still here\n\n"
