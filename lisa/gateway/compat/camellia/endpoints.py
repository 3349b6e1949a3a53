"""The endpoints of Camellia's API: access control, and errors in Camellia's format."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from mmap import mmap
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.delivery.group_resolution import SeveralGroups
from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import InvalidMessage, ServerUnavailable
from lisa.core.model.options import MAX_ACK_TIMEOUT
from lisa.gateway.access import Scope
from lisa.gateway.compat.camellia import wire
from lisa.gateway.compat.camellia.monitor import Monitor, MonitorData, exposition
from lisa.gateway.compat.camellia.queue import Queue, TopicInfo, topic_infos
from lisa.gateway.compat.camellia.wire import DelayMsg, as_pulled
from lisa.gateway.compat.requests import answering, record_change
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.pulls import HandedOut
from lisa.gateway.trace_context import trace_context

IDLE_S = 20.0

log = logging.getLogger("lisa.gateway.camellia")
QUEUE = "/camellia/delayQueue"
HEALTH = "/camellia/health"
TEXT = "text/plain;charset=UTF-8"
LONGEST_POLL_MS = 3_600_000
MOST_TIMEOUT_MS = duration_ms(MAX_ACK_TIMEOUT)
ANY_METHOD = ["GET", "POST", "PUT", "DELETE"]


class ServiceState:
    """The in-service flag and the time of the last client request."""

    def __init__(self, shared: mmap) -> None:
        # Whether the server is out of service, and the time of the last request.
        self._state = memoryview(shared).cast("d")
        if not self._state[1]:
            self.used()

    def used(self) -> None:
        """Record a client request."""
        # All processes of a machine share the monotonic clock.
        self._state[1] = time.monotonic()

    @property
    def is_online(self) -> bool:
        """Whether the server is in service."""
        return not self._state[0]

    def go_online(self) -> None:
        """Put the server in service."""
        self._state[0] = 0.0

    def go_offline(self) -> bool:
        """Take the server out of service; True once idle for `IDLE_S`, when it may be stopped."""
        self._state[0] = 1.0
        return time.monotonic() - self._state[1] > IDLE_S


Handler = Callable[[wire.Parameters], Awaitable[Response]]


def _failure(fields: Sequence[str], request: Request, problem: ErrorResponse) -> Response:
    """The response for an error: 401 or 403, 503 if the server is unavailable, or a code."""
    if isinstance(problem, wire.BadParameter):
        return wire.bad_request(request, problem)
    status = problem.status
    if status in (401, 403, 405):
        return wire.answer(status, status=status, headers=problem.headers, msg=problem.detail)
    if status == 503:  # on which the SDK stops using this server for a while
        return wire.answer(wire.UNKNOWN, status=status, headers=problem.headers, msg=None)
    empty: dict[str, Any] = dict.fromkeys(fields)
    if problem.kind == "invalid":
        log.info("%s: %s", request.url.path, problem.detail)
        return wire.answer(wire.PARAM_WRONG, **empty)
    log.warning("%s: %s", request.url.path, problem.detail)
    if problem.kind == _SEVERAL_GROUPS:
        empty["msg"] = problem.detail
    return wire.answer(wire.UNKNOWN, **empty)


_SEVERAL_GROUPS = "several-groups"


class Endpoints:
    """Camellia's endpoints on one gateway."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._settings = gateway.settings.camellia
        self._queue = Queue(gateway)
        self._service = ServiceState(gateway.shared)
        self.monitor = Monitor(gateway)

    def routes(self) -> list[BaseRoute]:
        """All routes, each with the fields of its response to an error."""
        queue = (
            ("POST", "sendMsg", self._send, ("msg", "delayMsg")),
            ("POST", "deleteMsg", self._delete, ("msg",)),
            ("POST", "pullMsg", self._pull, ("msg", "delayMsgList")),
            ("POST", "longPollingMsg", self._poll, ()),
            ("POST", "ackMsg", self._ack, ("msg",)),
            ("POST", "getMsg", self._get, ("msg", "delayMsg")),
            ("GET", "getMonitorData", self._monitor_data, ("data",)),
            ("GET", "getTopicInfo", self._topic_info, ("data",)),
            ("GET", "getTopicInfoList", self._topic_list, ("data",)),
            ("GET", "getMonitorString", self._monitor_string, ()),
            ("GET", "metrics", self._metrics, ()),
        )
        health = (
            ("status", self._status, False),
            ("check", self._check, False),
            ("online", self._online, True),
            ("offline", self._offline, True),
        )
        return [
            *(
                Route(
                    f"{QUEUE}/{name}",
                    self._endpoint(handler, fields, changes=method == "POST"),
                    methods=[method],
                )
                for method, name, handler, fields in queue
            ),
            *(
                Route(
                    f"{HEALTH}/{name}",
                    answering(handler, partial(_failure, ()), changes=changes),
                    methods=ANY_METHOD,
                )
                for name, handler, changes in health
            ),
        ]

    def _endpoint(
        self, handler: Handler, fields: Sequence[str], *, changes: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that returns errors as codes; the fields of its response are then null."""

        async def call(request: Request) -> Response:
            if changes:
                self._service.used()
            self._gateway.token(request, compat=True)
            try:
                return await handler(await wire.Parameters.of(request))
            except SeveralGroups as error:
                raise ErrorResponse(
                    409,
                    _SEVERAL_GROUPS,
                    f"topic {error.topic!r} has several groups: name one under groups in the "
                    "gateway's YAML",
                ) from error

        return answering(call, partial(_failure, fields), changes=changes)

    def _topic(self, given: wire.Parameters, scope: Scope) -> str:
        """The request's topic, if the token allows it. Raises Unauthorized or Forbidden."""
        topic = given.text("topic")
        self._gateway.require(given.request, scope, topic, compat=True)
        return topic

    async def _send(self, given: wire.Parameters) -> Response:
        topic, text = given.text("topic"), given.text("msg")
        delay_ms = given.integer("delayMillis")
        ttl_ms = given.integer("ttlMillis", -1)
        max_retry = given.integer("maxRetry", -1, bits=32)
        self._topic(given, Scope.PRODUCE)
        if not text:
            raise InvalidMessage("msg is empty")
        await self._queue.ensure(topic)
        message = await self._queue.send(
            topic,
            text,
            message_id=given.optional_text("msgId") or "",
            delay_ms=delay_ms,
            ttl_ms=ttl_ms,
            max_retry=max_retry,
            trace=trace_context(given.request.headers),
        )
        self.monitor.of(topic).send_msg += 1
        token = self._gateway.token(given.request, compat=True)
        if not token.allows(Scope.READ, topic):  # it may be another sender's message
            message = msgspec.structs.replace(message, msg=None)
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _delete(self, given: wire.Parameters) -> Response:
        # Checked but ignored: a body is always deleted with its message.
        given.boolean("release", default=False)
        message_id = given.text("msgId")
        topic = self._topic(given, Scope.PRODUCE)
        if not await self._queue.delete(topic, message_id):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        record_change(
            self._gateway, given.request, "camellia.deleteMsg", topic=topic, id=message_id
        )
        self.monitor.of(topic).delete_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _pull(self, given: wire.Parameters) -> Response:
        def render(found: list[DelayMsg]) -> bytes:
            return msgspec.json.encode({"code": wire.SUCCESS, "msg": None, "delayMsgList": found})

        return await self._deliver(given, render, wire.JSON)

    async def _poll(self, given: wire.Parameters) -> Response:
        wait_ms = given.integer("longPollingTimeoutMillis", -1)
        if wait_ms <= 0:
            wait_ms = duration_ms(self._settings.long_polling_timeout)
        # The original returns text, for which Spring chooses the content type by Accept.
        kind = wire.JSON if wire.JSON in given.request.headers.get("accept", "") else TEXT
        wait_s = min(wait_ms, LONGEST_POLL_MS) / 1000
        return await self._deliver(given, wire.compact, kind, wait_s)

    async def _deliver(
        self,
        given: wire.Parameters,
        render: Callable[[list[DelayMsg]], bytes],
        kind: str,
        wait_s: float = 0.0,
    ) -> Response:
        timeout_ms = given.integer("ackTimeoutMillis", -1)
        batch = given.integer("batch", -1, bits=32)
        topic, broker = self._topic(given, Scope.CONSUME), self._gateway.broker
        try:
            await self._queue.ensure(topic)
        except ServerUnavailable:
            if not wait_s:
                raise  # a long poll continues through an outage
        pull = broker.pull(
            topic,
            most=max(1, batch),
            ack_timeout_ms=min(timeout_ms, MOST_TIMEOUT_MS) if timeout_ms > 0 else None,
            wait_s=wait_s or await broker.first_pull_s(topic),
        )

        def rendered(deliveries: list[HandedOut]) -> bytes:
            found = [as_pulled(delivery.message) for delivery in deliveries]
            content = render(found)
            self._queue.remember(topic, deliveries)
            self.monitor.pulled(deliveries, found)
            return content

        return await hold(self._gateway, given.request, pull, rendered, kind)

    async def _ack(self, given: wire.Parameters) -> Response:
        message_id, handled = given.text("msgId"), given.boolean("ack")
        topic = self._topic(given, Scope.CONSUME)
        settle = self._queue.ack if handled else self._queue.nack
        if not await settle(topic, message_id):
            return wire.answer(wire.NOT_EXISTS, msg=None)
        self.monitor.of(topic).ack_msg += 1
        return wire.answer(wire.SUCCESS, msg="success")

    async def _get(self, given: wire.Parameters) -> Response:
        message_id = given.text("msgId")
        topic = self._topic(given, Scope.READ)
        message = await self._queue.get(topic, message_id)
        if message is None:
            return wire.answer(wire.NOT_EXISTS, msg=None, delayMsg=None)
        self.monitor.of(topic).get_msg += 1
        return wire.answer(wire.SUCCESS, msg="success", delayMsg=message)

    async def _monitor_data(self, given: wire.Parameters) -> Response:
        token = self._gateway.require(given.request, Scope.READ, compat=True)
        return wire.answer(wire.SUCCESS, data=self.monitor.last(token.sees))

    async def _topic_info(self, given: wire.Parameters) -> Response:
        topic = self._topic(given, Scope.READ)
        (info,) = await self._gateway.ask(topic_infos, [topic])
        return wire.answer(wire.SUCCESS, data=info)

    async def _topic_list(self, given: wire.Parameters) -> Response:
        _, infos = await self._read(given)
        return wire.answer(wire.SUCCESS, data=infos)

    async def _monitor_string(self, given: wire.Parameters) -> Response:
        data, infos = await self._read(given)
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

    async def _metrics(self, given: wire.Parameters) -> Response:
        data, infos = await self._read(given)
        prefix, cpu_usage = self._settings.metrics_prefix, self.monitor.cpu_usage
        return Response(exposition(prefix, data, infos, cpu_usage), media_type=TEXT)

    async def _read(self, given: wire.Parameters) -> tuple[MonitorData, list[TopicInfo]]:
        """The last interval, and the counts of all topics that the token may read."""
        token = self._gateway.require(given.request, Scope.READ, compat=True)
        topics = await self._gateway.store.drive(self._gateway.store.topics())
        seen = [topic for topic in topics if token.sees(topic)]
        return self.monitor.last(token.sees), await self._gateway.ask(topic_infos, seen)

    async def _status(self, _request: Request) -> Response:
        return _up(self._service.is_online)

    async def _check(self, _request: Request) -> Response:
        return _up(True)  # noqa: FBT003  the process is running

    async def _online(self, request: Request) -> Response:
        self._gateway.require(request, Scope.OPERATE, compat=True)
        self._service.go_online()
        record_change(self._gateway, request, "camellia.online")
        return _up(True)  # noqa: FBT003  now online

    async def _offline(self, request: Request) -> Response:
        self._gateway.require(request, Scope.OPERATE, compat=True)
        is_offline = self._service.go_offline()
        if is_offline:
            record_change(self._gateway, request, "camellia.offline")
        return _up(is_offline)


def _up(is_up: bool) -> Response:  # noqa: FBT001  its only argument
    code = 200 if is_up else 500
    return Response(b'{"code":%d}\n' % code, code, media_type=wire.JSON)
