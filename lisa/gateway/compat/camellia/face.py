"""The paths: who may ask, what is asked, and errors as camellia's clients know them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.clock import duration_ms
from lisa.core.errors import InvalidMessage, LisaError, ServerUnavailable
from lisa.core.options import MAX_ACK_TIMEOUT
from lisa.gateway.access import Forbidden, Scope, Token, Unauthorized
from lisa.gateway.compat.camellia import wire
from lisa.gateway.compat.camellia.clock import Clock
from lisa.gateway.compat.camellia.health import Service
from lisa.gateway.compat.camellia.messages import DelayMsg, as_pulled
from lisa.gateway.compat.camellia.metrics import exposition
from lisa.gateway.compat.camellia.monitor import Monitor
from lisa.gateway.compat.camellia.queue import Queue
from lisa.gateway.compat.camellia.topics import TopicInfo, Topics, topic_infos
from lisa.gateway.holding import ClientLeft, hold
from lisa.gateway.hub import Hub
from lisa.gateway.waiting import Crowded, Delivery

__all__ = ["Face"]

log = logging.getLogger("lisa.gateway.camellia")

QUEUE = "/camellia/delayQueue"
HEALTH = "/camellia/health"
TEXT = "text/plain;charset=UTF-8"
FIRST_PULL_MS = 1_000
"""How long a pull of a topic that has no group yet waits for a manager to declare one."""

LONGEST_POLL_MS = 3_600_000
ANY_METHOD = ["GET", "POST", "PUT", "DELETE"]

Handler = Callable[[Request, wire.Parameters], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


class _Wanted(NamedTuple):
    """What a pull asks for; `timeout_ms` None is the topic's own ack timeout."""

    topic: str
    most: int
    timeout_ms: int | None
    wait_ms: int


class Face:
    """Camellia's paths on one hub."""

    def __init__(self, hub: Hub) -> None:
        settings = hub.settings.camellia
        clock = Clock(hub.store)
        self._hub = hub
        self._settings = settings
        self._queue = Queue(hub, clock)
        self._topics = Topics(hub.store, settings)
        self._service = Service(hub.shared)
        self.monitor = Monitor(hub.store, clock, settings.monitor_interval.total_seconds())

    def routes(self) -> list[BaseRoute]:
        """All of them."""
        messages: list[tuple[str, Handler, dict[str, Any]]] = [
            ("sendMsg", self._send, {"msg": None, "delayMsg": None}),
            ("deleteMsg", self._delete, {"msg": None}),
            ("pullMsg", self._pull, {"msg": None, "delayMsgList": None}),
            ("longPollingMsg", self._poll, {}),
            ("ackMsg", self._ack, {"msg": None}),
            ("getMsg", self._get, {"msg": None, "delayMsg": None}),
        ]
        looks: list[tuple[str, Handler, dict[str, Any]]] = [
            ("getMonitorData", self._monitor_data, {"data": None}),
            ("getTopicInfo", self._topic_info, {"data": None}),
            ("getTopicInfoList", self._topic_list, {"data": None}),
            ("getMonitorString", self._monitor_string, {}),
            ("metrics", self._metrics, {}),
        ]
        health: list[tuple[str, Handler]] = [
            ("status", self._status), ("check", self._check),
            ("online", self._online), ("offline", self._offline),
        ]  # fmt: skip
        return [
            *(Route(f"{QUEUE}/{name}", self._guarded(handler, empty, is_use=True), methods=["POST"])
              for name, handler, empty in messages),
            *(Route(f"{QUEUE}/{name}", self._guarded(handler, empty), methods=["GET"])
              for name, handler, empty in looks),
            *(Route(f"{HEALTH}/{name}", self._guarded(handler, {}, is_open=True),
                    methods=ANY_METHOD) for name, handler in health),
        ]  # fmt: skip

    def _guarded(
        self,
        handler: Handler,
        empty: dict[str, Any],
        *,
        is_use: bool = False,
        is_open: bool = False,
    ) -> Endpoint:
        """Errors as codes; `empty` are the fields that such an answer has besides its code.

        is_use: a client of the queue is at work. is_open: whoever asks needs no token.
        """

        async def endpoint(request: Request) -> Response:
            if is_use:
                self._service.used()
            try:
                if not is_open:
                    self._token(request)
                return await handler(request, await wire.Parameters.of(request))
            except wire.BadParameter as error:
                return wire.bad_request(request, error)
            except Exception as error:  # noqa: BLE001  the original answers every one with a code
                return _failure(request, error, empty)

        return endpoint

    def _topic(self, request: Request, parameters: wire.Parameters, scope: Scope | None) -> str:
        """The topic, which the token allows."""
        topic = parameters.text("topic")
        self._hub.require(request, scope, topic, compat=True)
        return topic

    async def _send(self, request: Request, given: wire.Parameters) -> Response:
        topic, text = given.text("topic"), given.text("msg")
        delay_ms = given.integer("delayMillis")
        ttl_ms = given.integer("ttlMillis", -1)
        max_retry = given.integer("maxRetry", -1, bits=32)
        self._topic(request, given, Scope.PRODUCE)
        if not text:
            raise InvalidMessage("msg is empty")
        await self._topics.meet(topic)
        message = await self._queue.send(
            topic, text, message_id=given.optional_text("msgId") or "", delay_ms=delay_ms,
            ttl_ms=ttl_ms, max_retry=max_retry,
        )  # fmt: skip
        self.monitor.of(topic).send_msg += 1
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _delete(self, request: Request, given: wire.Parameters) -> Response:
        given.boolean("release", default=False)  # a body goes with its message here, at once
        message_id = given.text("msgId")
        topic = self._topic(request, given, Scope.PRODUCE)
        if not await self._queue.delete(topic, message_id):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        self.monitor.of(topic).delete_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _pull(self, request: Request, given: wire.Parameters) -> Response:
        wanted = self._wanted(request, given)
        await self._topics.meet(wanted.topic)
        if not await self._topics.has_group(wanted.topic):
            wanted = wanted._replace(wait_ms=FIRST_PULL_MS)

        def render(found: list[DelayMsg]) -> bytes:
            return msgspec.json.encode({"code": wire.SUCCESS, "msg": None, "delayMsgList": found})

        return await self._hold(request, wanted, render, wire.JSON)

    async def _poll(self, request: Request, given: wire.Parameters) -> Response:
        wait_ms = given.integer("longPollingTimeoutMillis", -1)
        if wait_ms <= 0:
            wait_ms = duration_ms(self._settings.long_polling_timeout)
        wanted = self._wanted(request, given)
        wanted = wanted._replace(wait_ms=min(wait_ms, LONGEST_POLL_MS))
        with suppress(ServerUnavailable):  # a poll stays through an outage
            await self._topics.meet(wanted.topic)

        def render(found: list[DelayMsg]) -> bytes:
            return wire.compact(wire.SUCCESS, found)

        # The original gives a text, which Spring labels by what the client accepts.
        is_json = wire.JSON in request.headers.get("accept", "")
        return await self._hold(request, wanted, render, wire.JSON if is_json else TEXT)

    def _wanted(self, request: Request, given: wire.Parameters) -> _Wanted:
        timeout_ms = given.integer("ackTimeoutMillis", -1)
        batch = given.integer("batch", -1, bits=32)
        topic = self._topic(request, given, Scope.CONSUME)
        limit_ms = duration_ms(MAX_ACK_TIMEOUT)
        return _Wanted(
            topic, max(1, batch), min(timeout_ms, limit_ms) if timeout_ms > 0 else None, 0
        )

    async def _hold(
        self,
        request: Request,
        wanted: _Wanted,
        render: Callable[[list[DelayMsg]], bytes],
        kind: str,
    ) -> Response:
        def rendered(deliveries: list[Delivery]) -> bytes:
            found = [as_pulled(one.message) for one in deliveries]
            content = render(found)
            self._queue.remember(wanted.topic, deliveries)
            self.monitor.pulled(deliveries, found)
            return content

        pull = self._hub.room.pull(
            wanted.topic, most=wanted.most, wait_s=wanted.wait_ms / 1000,
            ack_timeout_ms=wanted.timeout_ms,
        )  # fmt: skip
        return await hold(self._hub, request, pull, rendered, kind)

    async def _ack(self, request: Request, given: wire.Parameters) -> Response:
        message_id, handled = given.text("msgId"), given.boolean("ack")
        topic = self._topic(request, given, Scope.CONSUME)
        if not await self._queue.settle(topic, message_id, handled=handled):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        self.monitor.of(topic).ack_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _get(self, request: Request, given: wire.Parameters) -> Response:
        message_id = given.text("msgId")
        topic = self._topic(request, given, None)
        message = await self._queue.get(topic, message_id)
        if message is None:
            return wire.answer(wire.NOT_EXISTS, msg=None, delayMsg=None)
        self.monitor.of(topic).get_msg += 1
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _monitor_data(self, request: Request, _given: wire.Parameters) -> Response:
        return wire.answer(wire.SUCCESS, data=self.monitor.last(self._token(request).sees))

    async def _topic_info(self, request: Request, given: wire.Parameters) -> Response:
        topic = self._topic(request, given, None)
        (info,) = await self._infos([topic])
        return wire.answer(wire.SUCCESS, data=info)

    async def _topic_list(self, request: Request, _given: wire.Parameters) -> Response:
        return wire.answer(wire.SUCCESS, data=await self._all_infos(request))

    async def _monitor_string(self, request: Request, _given: wire.Parameters) -> Response:
        data = self.monitor.last(self._token(request).sees)
        infos = await self._all_infos(request)
        content = {
            "requestStats": data.request_stats_list,
            "pullMsgTimeGapStats": data.pull_msg_time_gap_stats_list,
            "readyQueueTimeGapStats": data.ready_queue_time_gap_stats_list,
            "topicInfoStats": [
                {"topic": one.topic, "waitingQueueSize": one.waiting_queue_size,
                 "ackQueueSize": one.ack_queue_size, "readyQueueSize": one.ready_queue_size}
                for one in infos
            ],
            "waitingQueueStats": [
                {**msgspec.to_builtins(one.waiting_queue_info), "topic": one.topic}
                for one in infos
            ],
        }  # fmt: skip
        return Response(msgspec.json.encode(content, order="sorted"), media_type=TEXT)

    async def _metrics(self, request: Request, _given: wire.Parameters) -> Response:
        data = self.monitor.last(self._token(request).sees)
        infos = await self._all_infos(request)
        prefix = self._settings.metrics_prefix
        text = exposition(prefix, data, infos, self.monitor.cpu_usage)
        return Response(text, media_type=TEXT)

    def _token(self, request: Request) -> Token:
        return self._hub.token(request, compat=True)

    async def _infos(self, topics: Sequence[str]) -> list[TopicInfo]:
        return await self._hub.store.drive(topic_infos(self._hub.store, topics))

    async def _all_infos(self, request: Request) -> list[TopicInfo]:
        token = self._token(request)
        topics = await self._hub.store.drive(self._hub.store.topics())
        return await self._infos([one for one in topics if token.sees(one)])

    async def _status(self, _request: Request, _given: wire.Parameters) -> Response:
        return _up(self._service.is_online)

    async def _check(self, _request: Request, _given: wire.Parameters) -> Response:
        return _up(True)  # noqa: FBT003  whoever gets this far lives

    async def _online(self, request: Request, _given: wire.Parameters) -> Response:
        self._allow_change(request)
        self._service.go_online()
        return _up(True)  # noqa: FBT003  it is

    async def _offline(self, request: Request, _given: wire.Parameters) -> Response:
        self._allow_change(request)
        return _up(self._service.go_offline())

    def _allow_change(self, request: Request) -> None:
        self._hub.require(request, Scope.OPERATE, compat=True)
        # These change something on GET: no page of another site may have a browser ask.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("a page of another site may not do this")


def _up(is_so: bool) -> Response:  # noqa: FBT001  its only argument
    code = 200 if is_so else 500
    return Response(b'{"code":%d}\n' % code, code, media_type=wire.JSON)


def _failure(request: Request, error: Exception, empty: dict[str, Any]) -> Response:
    """An error as an answer: what a token does not allow, what may be tried later, and codes."""
    if isinstance(error, ClientLeft):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, Unauthorized):
        return wire.refused(401, str(error), {"WWW-Authenticate": 'Bearer realm="lisa"'})
    if isinstance(error, Forbidden):
        return wire.refused(403, str(error))
    path = request.url.path
    if isinstance(error, InvalidMessage):
        log.info("%s: %s", path, error)
        return wire.answer(wire.PARAM_WRONG, **empty)
    if isinstance(error, (ServerUnavailable, Crowded)):
        log.warning("%s: %s", path, error)
        return wire.later()
    if isinstance(error, LisaError):
        log.warning("%s: %s", path, error)
    else:
        log.error("%s failed", path, exc_info=error)
    return wire.answer(wire.UNKNOWN, **empty)
