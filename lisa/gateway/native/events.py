"""A topic's counters as server-sent events: one look each second serves all who watch it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lisa.admin import live
from lisa.core.errors import LisaError
from lisa.gateway.hub import Hub
from lisa.gateway.native.models import Activity, NoFields
from lisa.gateway.native.operations import Call
from lisa.gateway.native.topics import counts_fields
from lisa.gateway.waiting import Crowded

__all__ = ["Feeds"]

LOOK_EVERY_S = 1.0
HEARTBEAT_S = 10.0
MOST_STREAMS = 500
"""Streams of one gateway process."""

_encoder = msgspec.json.Encoder()


class Feeds:
    """The topics that somebody watches."""

    def __init__(self) -> None:
        self._feeds: dict[str, _Feed] = {}

    async def stream(self, call: Call[NoFields, None]) -> Response:
        """Watch a topic until the client leaves or the gateway stops."""
        if call.hub.streams >= MOST_STREAMS:
            raise Crowded(f"{call.hub.streams} streams are open already")
        return _Stream(call.hub, call.request, self, call.topic)

    def feed(self, hub: Hub, topic: str) -> _Feed:
        """The feed of a topic, begun by the first who watches."""
        feed = self._feeds.get(topic)
        if feed is None or feed.task.done():
            feed = self._feeds[topic] = _Feed(hub, topic)
        feed.watchers += 1
        return feed

    def leave(self, feed: _Feed) -> None:
        """One fewer watches; the last one ends the feed."""
        feed.watchers -= 1
        if not feed.watchers:
            feed.task.cancel()
            if self._feeds.get(feed.topic) is feed:
                del self._feeds[feed.topic]


class _Feed:
    """Looks at one topic; `event` is the newest, its number tells whether it has been sent."""

    def __init__(self, hub: Hub, topic: str) -> None:
        self.topic = topic
        self.watchers = 0
        self.number = 0
        self.event = b""
        self._hub = hub
        self._news = asyncio.Event()
        self.task = hub.keep_running(self._run(), f"the events of {topic}")

    async def news(self, after: int) -> None:
        """Wait for an event that is newer; not beyond a heartbeat, and not beyond the feed."""
        if self.number > after or self.task.done():
            return
        waiting = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({waiting, self.task}, timeout=HEARTBEAT_S,
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            waiting.cancel()

    async def _run(self) -> None:
        before: live.Look | None = None
        shown: dict[str, Any] = {}
        while not self._hub.room.is_closing:
            with suppress(LisaError):  # a server that is away is looked for again
                now = await self._hub.store.drive(live.look(self._hub.store, [self.topic]))
                fields = _fields(before or now, now)
                before = now
                if fields != shown:
                    shown = fields
                    self._tell(Activity(**fields, at_ms=now.at_us // 1000))
            await asyncio.sleep(LOOK_EVERY_S)

    def _tell(self, activity: Activity) -> None:
        self.number += 1
        self.event = b"event: counts\ndata: " + _encoder.encode(activity) + b"\n\n"
        self._news.set()
        self._news = asyncio.Event()


def _fields(before: live.Look, now: live.Look) -> dict[str, Any]:
    (one,) = live.activity(before, now)
    return {
        **counts_fields(one.counts),
        "in_per_s": round(one.in_per_s, 1), "out_per_s": round(one.out_per_s, 1),
        "retried_per_s": round(one.retried_per_s, 1),
        "garbage_per_s": round(one.garbage_per_s, 1),
        "lateness_p50_ms": one.p50_ms, "lateness_p99_ms": one.p99_ms,
    }  # fmt: skip


class _Stream(Response):
    """An answer that goes on; what a slow client did not read in time is skipped, not kept."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, request: Request, feeds: Feeds, topic: str) -> None:
        super().__init__(b"")
        del self.headers["content-length"]
        self._hub = hub
        self._request = request
        self._feeds = feeds
        self._topic = topic

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send events until the client has left or the gateway stops."""
        feed = self._feeds.feed(self._hub, self._topic)
        self._hub.streams += 1
        departure = asyncio.create_task(self._departure())
        sending = asyncio.create_task(self._send(feed, send))
        try:
            await asyncio.wait({departure, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (departure, sending):
                task.cancel()
            await asyncio.gather(departure, sending, return_exceptions=True)
            self._hub.streams -= 1
            self._feeds.leave(feed)

    async def _departure(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    async def _send(self, feed: _Feed, send: Send) -> None:
        await send({
            "type": "http.response.start", "status": 200, "headers": self.raw_headers,
        })  # fmt: skip
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
