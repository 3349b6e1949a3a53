"""Clients for camellia's wire format: plain calls, and a double of its Java SDK.

The double behaves like that SDK, including its flaws: form POSTs with a charset and no other
header, timeouts of 5 s (for a poll, twice its wait), any HTTP status but 200 is an error, no call
is repeated, and a failed server is skipped until no other is left.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import httpx

from tests.gateways import NO_TLS, new_topic
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

QUEUE = "/camellia/delayQueue"
HEALTH = "/camellia/health"
FORM = "application/x-www-form-urlencoded; charset=utf-8"

Message = dict[str, Any]


class Queue:
    """One topic over one client; checks or returns the code of each response."""

    def __init__(self, client: httpx.Client, topic: str) -> None:
        self.client = client
        self.topic = topic

    def post(self, name: str, **form: object) -> dict[str, Any]:
        """One call; the body of its HTTP 200 response."""
        answer = self.client.post(f"{QUEUE}/{name}", data={"topic": self.topic, **form})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def send(self, msg: str = "text", delay_ms: int = 0, **form: object) -> Message:
        """Send a message; must succeed."""
        body = self.post("sendMsg", msg=msg, delayMillis=delay_ms, **form)
        assert (body["code"], body["msg"]) == (200, "success"), body
        message: Message = body["delayMsg"]
        return message

    def pull(self, **form: object) -> list[Message]:
        """Pull available messages."""
        body = self.post("pullMsg", **form)
        assert (body["code"], body["msg"]) == (200, None), body
        found: list[Message] = body["delayMsgList"]
        return found

    def poll(self, wait_ms: int = 10_000, **form: object) -> list[Message]:
        """Poll for messages up to the given time."""
        body = self.post("longPollingMsg", longPollingTimeoutMillis=wait_ms, **form)
        assert body.keys() == {"code", "delayMsgList"}, body
        found: list[Message] = body["delayMsgList"]
        return found

    def settle(self, message_id: str, *, ack: bool) -> int:
        """Ack or nack; returns the code."""
        code: int = self.post("ackMsg", msgId=message_id, ack=str(ack).lower())["code"]
        return code

    def delete(self, message_id: str) -> int:
        """Delete a message; returns the code."""
        code: int = self.post("deleteMsg", msgId=message_id)["code"]
        return code

    def get(self, message_id: str) -> Message | None:
        """The message in its present state."""
        body = self.post("getMsg", msgId=message_id)
        assert body["code"] == (404 if body["delayMsg"] is None else 200)
        message: Message | None = body["delayMsg"]
        return message

    def status(self, message_id: str) -> int | None:
        """Its status, 1 to 7."""
        found = self.get(message_id)
        return None if found is None else found["status"]

    def info(self) -> dict[str, Any]:
        """getTopicInfo."""
        body = self.client.get(f"{QUEUE}/getTopicInfo", params={"topic": self.topic}).json()
        data: dict[str, Any] = body["data"]
        return data


def shorten_ack_timeout(redis_url: str, topic: str) -> None:
    """Create a topic with a short ack timeout.

    A manager that has just started takes nothing back before one ack timeout has passed.
    """
    with connect(redis_url) as redis:
        redis.hset(f"lisa:{{{topic}}}:options", "ack_timeout", "2000")


def queue_with_group(client: httpx.Client, redis_url: str) -> Queue:
    """A new topic with a group declared by a manager and a short ack timeout."""
    queue = Queue(client, new_topic())
    shorten_ack_timeout(redis_url, queue.topic)
    queue.poll(wait_ms=1)
    with connect(redis_url) as redis:
        wait_until(lambda: redis.hlen(f"lisa:{{{queue.topic}}}:groups"))
    return queue


class SdkError(Exception):
    """The SDK's exception."""


class Sdk:
    """The Java SDK's double, on a fixed list of servers."""

    TIMEOUT_S = 5.0
    RELOAD_S = 60.0

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = list(servers)
        self.errors: list[Exception] = []
        self._dynamic = list(servers)
        self._reloaded = time.monotonic()
        self._client = httpx.Client(timeout=self.TIMEOUT_S, verify=NO_TLS)
        self._threads: list[threading.Thread] = []
        self._running = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running = False
        for thread in self._threads:
            thread.join(30)
        self._client.close()

    def send(
        self,
        topic: str,
        msg: str,
        delay_ms: int,
        *,
        msg_id: str | None = None,
        ttl_ms: int = -1,
        max_retry: int = -1,
    ) -> Message:
        """sendMsg."""
        form = {
            "topic": topic,
            "msg": msg,
            "delayMillis": delay_ms,
            "ttlMillis": ttl_ms,
            "maxRetry": max_retry,
        }
        body = self._call("sendMsg", form if msg_id is None else {**form, "msgId": msg_id})
        if body["code"] != 200:
            raise SdkError(body)
        message: Message = body["delayMsg"]
        return message

    def delete(self, topic: str, msg_id: str) -> bool:
        """deleteMsg; `release` is never sent."""
        body = self._call("deleteMsg", {"topic": topic, "msgId": msg_id})
        if body["code"] not in (200, 404):
            raise SdkError(body)
        return bool(body["code"] == 200)

    def get(self, topic: str, msg_id: str) -> Message | None:
        """getMsg."""
        body = self._call("getMsg", {"topic": topic, "msgId": msg_id})
        if body["code"] not in (200, 404):
            raise SdkError(body)
        message: Message | None = body["delayMsg"] if body["code"] == 200 else None
        return message

    def listen(
        self,
        topic: str,
        on_msg: Callable[[Message], bool],
        *,
        batch: int = 1,
        ack_timeout_ms: int = 30_000,
        poll_ms: int | None = 10_000,
        interval_s: float = 0.1,
    ) -> None:
        """addMsgListener: a thread that pulls, calls the listener, and acks or nacks."""

        def run() -> None:
            while self._running:
                form: dict[str, object] = {
                    "topic": topic,
                    "ackTimeoutMillis": ack_timeout_ms,
                    "batch": batch,
                }
                try:
                    if poll_ms is None:
                        body = self._call("pullMsg", form)
                    else:
                        form["longPollingTimeoutMillis"] = poll_ms
                        body = self._call("longPollingMsg", form, poll_ms * 2 / 1000)
                except (SdkError, httpx.HTTPError) as error:
                    self.errors.append(error)
                    time.sleep(interval_s)
                    continue
                found = body.get("delayMsgList") if body["code"] == 200 else None
                for message in found or ():
                    try:
                        ack = on_msg(message)
                    except Exception:  # noqa: BLE001  a listener that throws is a nack
                        ack = False
                    with suppress(SdkError, httpx.HTTPError):
                        self._call(
                            "ackMsg",
                            {
                                "topic": message["topic"],
                                "msgId": message["msgId"],
                                "ack": str(ack).lower(),
                            },
                        )
                if not found:
                    time.sleep(interval_s)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _call(
        self, name: str, form: dict[str, Any], timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        if not self._dynamic or time.monotonic() - self._reloaded > self.RELOAD_S:
            self._dynamic, self._reloaded = list(self.servers), time.monotonic()
        server = random.choice(self._dynamic)
        try:
            answer = self._client.post(
                f"{server}{QUEUE}/{name}",
                content=str(httpx.QueryParams(form)),
                headers={"Content-Type": FORM},
                timeout=timeout_s,
            )
            if answer.status_code != 200:
                raise SdkError(f"http.code={answer.status_code}")
        except (SdkError, httpx.HTTPError):
            with suppress(ValueError):  # another thread was faster
                self._dynamic.remove(server)
            raise
        body: dict[str, Any] = answer.json()
        return body
