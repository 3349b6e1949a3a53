"""The endpoints of Camellia's API: access control, and errors in Camellia's format."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.delivery.group_resolution import SeveralGroups
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import InvalidMessage, LisaError, ServerUnavailable
from lisa.core.model.options import MAX_ACK_TIMEOUT
from lisa.gateway.access import Forbidden, Scope, Token, Unauthorized
from lisa.gateway.compat.camellia import wire
from lisa.gateway.compat.camellia.monitor import Monitor, exposition
from lisa.gateway.compat.camellia.queue import Queue, TopicInfo, Topics, topic_infos
from lisa.gateway.compat.camellia.wire import DelayMsg, as_pulled
from lisa.gateway.compat.requests import record_change
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import CHALLENGE, RETRY_LATER, BoundedWarnings, ClientDisconnected
from lisa.gateway.pulls import HandedOut
from lisa.gateway.shares import Crowded
from lisa.gateway.trace_context import trace_context

IDLE_S = 20.0

_STATE = struct.Struct("=?7xd")
_LAST_USE = struct.Struct("=d")

log = logging.getLogger("lisa.gateway.camellia")
QUEUE = "/camellia/delayQueue"
HEALTH = "/camellia/health"
TEXT = "text/plain;charset=UTF-8"
LONGEST_POLL_MS = 3_600_000
ANY_METHOD = ["GET", "POST", "PUT", "DELETE"]


class ServiceState:
    """The in-service flag and the time of the last client request."""

    def __init__(self, shared: mmap) -> None:
        self._shared = shared
        if not _STATE.unpack_from(shared)[1]:
            self.used()

    def used(self) -> None:
        """Record a client request."""
        # All processes of a machine share the monotonic clock.
        _LAST_USE.pack_into(self._shared, 8, time.monotonic())

    @property
    def is_online(self) -> bool:
        """Whether the server is in service."""
        offline: bool = _STATE.unpack_from(self._shared)[0]
        return not offline

    def go_online(self) -> None:
        """Put the server in service."""
        self._shared[0] = 0

    def go_offline(self) -> bool:
        """Take the server out of service; True once idle for `IDLE_S`, when it may be stopped."""
        self._shared[0] = 1
        last: float = _STATE.unpack_from(self._shared)[1]
        return time.monotonic() - last > IDLE_S


Handler = Callable[[Request, wire.Parameters], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def guarded(
    gateway: GatewayContext,
    handler: Handler,
    empty: dict[str, Any],
    service: ServiceState | None = None,
    *,
    is_open: bool = False,
) -> Endpoint:
    """An endpoint that returns errors as codes, with the fields in `empty`.

    service: records each request as client activity. is_open: no token is needed.
    """

    async def endpoint(request: Request) -> Response:
        if service is not None:
            service.used()
        try:
            if not is_open:
                gateway.token(request, compat=True)
            return await handler(request, await wire.Parameters.of(request))
        except wire.BadParameter as error:
            return wire.bad_request(request, error)
        except Exception as error:  # noqa: BLE001  the original returns a code for any error
            return _failure(request, error, empty)

    return endpoint


_refusals = BoundedWarnings(log)


def allowed_topic(
    gateway: GatewayContext, request: Request, parameters: wire.Parameters, scope: Scope
) -> str:
    """The request's topic, if the token allows it. Raises Unauthorized or Forbidden."""
    topic = parameters.text("topic")
    gateway.require(request, scope, topic, compat=True)
    return topic


def _failure(request: Request, error: Exception, empty: dict[str, Any]) -> Response:
    """The response for an error: 401 or 403, 503 if the server is unavailable, or a code."""
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)  # no client reads it
    if isinstance(error, Unauthorized):
        return wire.answer(401, status=401, headers=CHALLENGE, msg=str(error))
    if isinstance(error, Forbidden):
        return wire.answer(403, status=403, msg=str(error))
    path = request.url.path
    if isinstance(error, InvalidMessage):
        log.info("%s: %s", path, error)
        return wire.answer(wire.PARAM_WRONG, **empty)
    if isinstance(error, (ServerUnavailable, Crowded)):
        _refusals.warn("%s: %s", path, error)
        # On 503 the SDK stops using this server for a while.
        return wire.answer(wire.UNKNOWN, status=503, headers=RETRY_LATER, msg=None)
    if isinstance(error, SeveralGroups):
        reason = (
            f"topic {error.topic!r} has several groups: name one under groups in the gateway's YAML"
        )
        log.warning("%s: %s", path, reason)
        return wire.answer(wire.UNKNOWN, **{**empty, "msg": reason})
    if isinstance(error, LisaError):
        log.warning("%s: %s", path, error)
    else:
        log.error("%s failed", path, exc_info=error)
    return wire.answer(wire.UNKNOWN, **empty)


Pull: TypeAlias = Callable[..., Coroutine[Any, Any, list[HandedOut]]]
"""`PullBroker.pull` with the parameters of a request; takes the times to wait."""


class Endpoints:
    """Camellia's endpoints on one gateway."""

    def __init__(self, gateway: GatewayContext) -> None:
        settings = gateway.settings.camellia
        clock = gateway.clock
        self._gateway = gateway
        self._settings = settings
        self._queue = Queue(gateway, clock)
        self._topics = Topics(gateway.store, settings)
        self._service = ServiceState(gateway.shared)
        self.monitor = Monitor(gateway.store, clock, settings.monitor_interval.total_seconds())

    def routes(self) -> list[BaseRoute]:
        """All routes."""
        gateway, service = self._gateway, self._service
        messages: list[tuple[str, Handler, dict[str, Any]]] = [
            ("sendMsg", self._send, {"msg": None, "delayMsg": None}),
            ("deleteMsg", self._delete, {"msg": None}),
            ("pullMsg", self._pull, {"msg": None, "delayMsgList": None}),
            ("longPollingMsg", self._poll, {}),
            ("ackMsg", self._ack, {"msg": None}),
            ("getMsg", self._get, {"msg": None, "delayMsg": None}),
        ]
        reads: list[tuple[str, Handler, dict[str, Any]]] = [
            ("getMonitorData", self._monitor_data, {"data": None}),
            ("getTopicInfo", self._topic_info, {"data": None}),
            ("getTopicInfoList", self._topic_list, {"data": None}),
            ("getMonitorString", self._monitor_string, {}),
            ("metrics", self._metrics, {}),
        ]
        health: list[tuple[str, Handler]] = [
            ("status", self._status),
            ("check", self._check),
            ("online", self._online),
            ("offline", self._offline),
        ]
        return [
            *(
                Route(
                    f"{QUEUE}/{name}", guarded(gateway, handler, empty, service), methods=["POST"]
                )
                for name, handler, empty in messages
            ),
            *(
                Route(f"{QUEUE}/{name}", guarded(gateway, handler, empty), methods=["GET"])
                for name, handler, empty in reads
            ),
            *(
                Route(
                    f"{HEALTH}/{name}",
                    guarded(gateway, handler, {}, is_open=True),
                    methods=ANY_METHOD,
                )
                for name, handler in health
            ),
        ]

    async def _send(self, request: Request, given: wire.Parameters) -> Response:
        topic, text = given.text("topic"), given.text("msg")
        delay_ms = given.integer("delayMillis")
        ttl_ms = given.integer("ttlMillis", -1)
        max_retry = given.integer("maxRetry", -1, bits=32)
        allowed_topic(self._gateway, request, given, Scope.PRODUCE)
        if not text:
            raise InvalidMessage("msg is empty")
        await self._topics.ensure(topic)
        message = await self._queue.send(
            topic,
            text,
            message_id=given.optional_text("msgId") or "",
            delay_ms=delay_ms,
            ttl_ms=ttl_ms,
            max_retry=max_retry,
            trace=trace_context(request.headers),
        )
        self.monitor.of(topic).send_msg += 1
        token = self._gateway.token(request, compat=True)
        if not token.allows(Scope.READ, topic):  # it may be another sender's message
            message = msgspec.structs.replace(message, msg=None)
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _delete(self, request: Request, given: wire.Parameters) -> Response:
        # Checked but ignored: a body is always deleted with its message.
        given.boolean("release", default=False)
        message_id = given.text("msgId")
        topic = allowed_topic(self._gateway, request, given, Scope.PRODUCE)
        if not await self._queue.delete(topic, message_id):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        record_change(self._gateway, request, "camellia.deleteMsg", topic=topic, id=message_id)
        self.monitor.of(topic).delete_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _pull(self, request: Request, given: wire.Parameters) -> Response:
        topic, pull = self._wanted(request, given)
        await self._topics.ensure(topic)
        join_s = await self._gateway.broker.first_pull_s(topic)

        def render(found: list[DelayMsg]) -> bytes:
            return msgspec.json.encode({"code": wire.SUCCESS, "msg": None, "delayMsgList": found})

        return await self._hold(request, topic, pull(join_s=join_s), render, wire.JSON)

    async def _poll(self, request: Request, given: wire.Parameters) -> Response:
        wait_ms = given.integer("longPollingTimeoutMillis", -1)
        if wait_ms <= 0:
            wait_ms = duration_ms(self._settings.long_polling_timeout)
        topic, pull = self._wanted(request, given)
        with suppress(ServerUnavailable):  # a long poll continues through an outage
            await self._topics.ensure(topic)

        # The original returns text, for which Spring chooses the content type by Accept.
        kind = wire.JSON if wire.JSON in request.headers.get("accept", "") else TEXT
        work = pull(wait_s=min(wait_ms, LONGEST_POLL_MS) / 1000)
        return await self._hold(request, topic, work, wire.compact, kind)

    def _wanted(self, request: Request, given: wire.Parameters) -> tuple[str, Pull]:
        """The topic of a pull, and the pull."""
        timeout_ms = given.integer("ackTimeoutMillis", -1)
        batch = given.integer("batch", -1, bits=32)
        topic = allowed_topic(self._gateway, request, given, Scope.CONSUME)
        limit_ms = duration_ms(MAX_ACK_TIMEOUT)
        return topic, partial(
            self._gateway.broker.pull,
            topic,
            most=max(1, batch),
            ack_timeout_ms=min(timeout_ms, limit_ms) if timeout_ms > 0 else None,
        )

    async def _hold(
        self,
        request: Request,
        topic: str,
        pull: Coroutine[Any, Any, list[HandedOut]],
        render: Callable[[list[DelayMsg]], bytes],
        kind: str,
    ) -> Response:
        def rendered(deliveries: list[HandedOut]) -> bytes:
            found = [as_pulled(delivery.message) for delivery in deliveries]
            content = render(found)
            self._queue.remember(topic, deliveries)
            self.monitor.pulled(deliveries, found)
            return content

        return await hold(self._gateway, request, pull, rendered, kind)

    async def _ack(self, request: Request, given: wire.Parameters) -> Response:
        message_id, handled = given.text("msgId"), given.boolean("ack")
        topic = allowed_topic(self._gateway, request, given, Scope.CONSUME)
        if not await self._queue.settle(topic, message_id, handled=handled):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        self.monitor.of(topic).ack_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _get(self, request: Request, given: wire.Parameters) -> Response:
        message_id = given.text("msgId")
        topic = allowed_topic(self._gateway, request, given, Scope.READ)
        message = await self._queue.get(topic, message_id)
        if message is None:
            return wire.answer(wire.NOT_EXISTS, msg=None, delayMsg=None)
        self.monitor.of(topic).get_msg += 1
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _monitor_data(self, request: Request, _given: wire.Parameters) -> Response:
        return wire.answer(wire.SUCCESS, data=self.monitor.last(self._reader(request).sees))

    async def _topic_info(self, request: Request, given: wire.Parameters) -> Response:
        topic = allowed_topic(self._gateway, request, given, Scope.READ)
        (info,) = await self._infos([topic])
        return wire.answer(wire.SUCCESS, data=info)

    async def _topic_list(self, request: Request, _given: wire.Parameters) -> Response:
        return wire.answer(wire.SUCCESS, data=await self._all_infos(request))

    async def _monitor_string(self, request: Request, _given: wire.Parameters) -> Response:
        data = self.monitor.last(self._reader(request).sees)
        infos = await self._all_infos(request)
        content = {
            "requestStats": data.request_stats_list,
            "pullMsgTimeGapStats": data.pull_msg_time_gap_stats_list,
            "readyQueueTimeGapStats": data.ready_queue_time_gap_stats_list,
            "topicInfoStats": [
                {
                    "topic": info.topic,
                    "waitingQueueSize": info.waiting_queue_size,
                    "ackQueueSize": info.ack_queue_size,
                    "readyQueueSize": info.ready_queue_size,
                }
                for info in infos
            ],
            "waitingQueueStats": [
                {**info.waiting_queue_info, "topic": info.topic} for info in infos
            ],
        }
        return Response(msgspec.json.encode(content, order="sorted"), media_type=TEXT)

    async def _metrics(self, request: Request, _given: wire.Parameters) -> Response:
        data = self.monitor.last(self._reader(request).sees)
        infos = await self._all_infos(request)
        prefix = self._settings.metrics_prefix
        text = exposition(prefix, data, infos, self.monitor.cpu_usage)
        return Response(text, media_type=TEXT)

    def _reader(self, request: Request) -> Token:
        return self._gateway.require(request, Scope.READ, compat=True)

    async def _infos(self, topics: Sequence[str]) -> list[TopicInfo]:
        return await self._gateway.ask(topic_infos, topics)

    async def _all_infos(self, request: Request) -> list[TopicInfo]:
        token = self._reader(request)
        topics = await self._gateway.store.drive(self._gateway.store.topics())
        return await self._infos([topic for topic in topics if token.sees(topic)])

    async def _status(self, _request: Request, _given: wire.Parameters) -> Response:
        return _up(self._service.is_online)

    async def _check(self, _request: Request, _given: wire.Parameters) -> Response:
        return _up(True)  # noqa: FBT003  the process is running

    async def _online(self, request: Request, _given: wire.Parameters) -> Response:
        self._allow_change(request)
        self._service.go_online()
        record_change(self._gateway, request, "camellia.online")
        return _up(True)  # noqa: FBT003  now online

    async def _offline(self, request: Request, _given: wire.Parameters) -> Response:
        self._allow_change(request)
        is_offline = self._service.go_offline()
        if is_offline:
            record_change(self._gateway, request, "camellia.offline")
        return _up(is_offline)

    def _allow_change(self, request: Request) -> None:
        self._gateway.require(request, Scope.OPERATE, compat=True)
        # These endpoints change state on GET, so cross-site requests are rejected.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("cross-site request rejected")


def _up(is_up: bool) -> Response:  # noqa: FBT001  its only argument
    code = 200 if is_up else 500
    return Response(b'{"code":%d}\n' % code, code, media_type=wire.JSON)
