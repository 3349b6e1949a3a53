"""Performs the steps of the clients' scenarios with the Python package."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import lisa
from tests.clients.conformance import STEP_S, StepFailed

KINDS: dict[type[Exception], str] = {lisa.TopicFull: "topic-full", lisa.InvalidMessage: "invalid"}
KINDS |= {lisa.DuplicateMessage: "duplicate"}


def milliseconds(count: int | None) -> timedelta | None:
    return None if count is None else timedelta(milliseconds=count)


class PythonRunner:
    """A producer, a consumer that pulls, and a worker."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        self._threads = ThreadPoolExecutor()
        self._producer = lisa.Producer(redis_url)
        self._pullers: dict[str | None, lisa.Consumer] = {}
        self._deliveries: dict[str, lisa.Delivery] = {}
        self._worker: Worker | None = None

    def perform(self, name: str, topic: str, given: Any) -> Future[Any]:
        """Perform the method with the step's name on a thread."""

        def call() -> Any:
            try:
                # As from another process: enums become text.
                return json.loads(json.dumps(getattr(self, name)(topic, given)))
            except lisa.LisaError as error:
                raise StepFailed(KINDS.get(type(error), repr(error))) from error

        return self._threads.submit(call)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.finish()
            self._worker.consumer.stop()
        self._threads.shutdown()
        self._producer.close()
        for puller in self._pullers.values():
            puller.stop()

    def send(self, topic: str, given: dict[str, Any]) -> Any:
        message = options_of(given)
        outcome = self._producer.send_one(topic, message.pop("body"), **message)
        if outcome.outcome == "rejected":
            raise lisa.DuplicateMessage
        return outcome._asdict()

    def send_batch(self, topic: str, given: list[dict[str, Any]]) -> Any:
        messages = [lisa.Outgoing(**options_of(one)) for one in given]
        return [one._asdict() for one in self._producer.send_many(topic, messages)]

    def get(self, topic: str, given: str) -> Any:
        found = self._producer.get(topic, given)
        if found is None:
            return None
        groups = {name: state_of(one) for name, one in found.groups.items()}
        return state_of(found) | shown(found.body) | {"groups": groups}

    def cancel(self, topic: str, given: str) -> Any:
        return self._producer.cancel(topic, given)

    def reschedule(self, topic: str, given: dict[str, Any]) -> Any:
        options = options_of(given)
        return self._producer.reschedule(topic, options.pop("id"), **options)

    def fire(self, topic: str, given: str) -> Any:
        return self._producer.fire_now(topic, given)

    def list_key(self, topic: str, given: str) -> Any:
        found = self._producer.list_key(topic, given)
        messages = [{"id": one.id, "key": one.key} | state_of(one) for one in found]
        return {"count": self._producer.count_key(topic, given), "messages": messages}

    def cancel_key(self, topic: str, given: str) -> Any:
        return changed(self._producer.cancel_key(topic, given))

    def reschedule_key(self, topic: str, given: dict[str, Any]) -> Any:
        options = options_of(given)
        return changed(self._producer.reschedule_key(topic, options.pop("key"), **options))

    def fire_key(self, topic: str, given: str) -> Any:
        return changed(self._producer.fire_key(topic, given))

    def pull(self, topic: str, given: dict[str, Any]) -> Any:
        group = given.get("group")
        puller = self._pullers.setdefault(group, lisa.Consumer(self._url, group=group))
        pulled = puller.pull(
            topic,
            batch=given.get("max", 1),
            wait=timedelta(milliseconds=given.get("wait_ms", 0)),
            ack_timeout=milliseconds(given.get("ack_timeout_ms")),
        )
        self._deliveries |= {f"{one.id}/{one.attempt}": one for one in pulled}
        return [
            {"id": one.id, "attempt": one.attempt, "headers": one.headers} | shown(one.body)
            for one in pulled
        ]

    def ack(self, _: str, given: str) -> Any:
        return held(self._deliveries[given].ack())

    def retry(self, _: str, given: dict[str, Any]) -> Any:
        delay, reason = milliseconds(given.get("delay_ms")), given.get("reason", "")
        return held(self._deliveries[given["of"]].retry(delay=delay, reason=reason))

    def defer(self, _: str, given: dict[str, Any]) -> Any:
        delay, reason = timedelta(milliseconds=given["delay_ms"]), given.get("reason", "")
        rests_lane = given.get("rests_lane", False)
        delivery = self._deliveries[given["of"]]
        return held(delivery.defer(delay=delay, reason=reason, rests_lane=rests_lane))

    def discard(self, _: str, given: dict[str, Any]) -> Any:
        return held(self._deliveries[given["of"]].discard(given["reason"]))

    def extend(self, _: str, given: str) -> None:
        held(self._deliveries[given].extend())

    def release(self, _: str, given: str) -> None:
        held(self._deliveries[given].release())

    def start_worker(self, topic: str, given: dict[str, Any]) -> None:
        """The ack timeout is the topic's."""
        self._worker = Worker(self._url, topic, given)

    def worker(self, _topic: str, _given: None) -> Any:
        assert self._worker is not None
        return self._worker.report()

    def finish_handlers(self, _topic: str, _given: None) -> None:
        assert self._worker is not None
        self._worker.finish()

    def stop_worker(self, _topic: str, _given: None) -> None:
        assert self._worker is not None
        self._stopped = self._threads.submit(self._worker.consumer.stop)

    def worker_ended(self, _topic: str, _given: None) -> None:
        self._stopped.result(STEP_S)


class Worker:
    """A consumer and what its handler has seen."""

    def __init__(self, redis_url: str, topic: str, given: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._started: list[str] = []
        self._ended: list[str] = []
        self._most = 0
        self._finish = threading.Event()
        group, concurrency = given.get("group"), given["concurrency"]
        self.consumer = lisa.Consumer(redis_url, group=group, concurrency=concurrency)
        self.consumer.on(topic)(self._handle)
        self.consumer.start()

    def _handle(self, message: lisa.Message) -> None:
        name, body = f"{message.id}/{message.attempt}", message.body
        with self._lock:
            self._started.append(name)
            calls = sum(one.startswith(f"{message.id}/") for one in self._started)
            self._most = max(self._most, len(self._started) - len(self._ended))
        if body.get("holds"):
            self._finish.wait(STEP_S)
        with self._lock:
            self._ended.append(name)
        if calls > body.get("fails", 0):
            return
        match body.get("with"):
            case "discard":
                raise lisa.Discard("no such order")
            case "retry":
                raise lisa.Retry("closed", delay=milliseconds(body.get("delay_ms")))
            case "defer" if body.get("rests_lane"):
                retry_after = timedelta(milliseconds=body["delay_ms"])
                raise lisa.Limited("busy", retry_after=retry_after)
            case "defer":
                raise lisa.Defer("busy", delay=timedelta(milliseconds=body["delay_ms"]))
            case "panic":
                raise SystemExit
        raise RuntimeError("broken")

    def finish(self) -> None:
        """Let all handlers return."""
        self._finish.set()

    def report(self) -> dict[str, Any]:
        """The handlers that have started and ended, and the maximum that ran at a time."""
        with self._lock:
            started, ended = sorted(self._started), sorted(self._ended)
        return {"started": started, "ended": ended, "most": self._most, "aborted": []}


_NAMES = {"due_ms": "at_ms", "bytes": "body"}
_DURATIONS = ("delay", "ttl", "shift", "debounce", "slack")
_NAMES |= {f"{name}_ms": name for name in _DURATIONS}


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """A step's arguments as keyword arguments."""
    found = {_NAMES.get(name, name): value for name, value in given.items()}
    for name in _DURATIONS:
        if name in found:
            found[name] = milliseconds(found[name])
    if "retry" in found:
        found["retry"] = [milliseconds(one) for one in found["retry"]]
    if "bytes" in given:
        found["body"] = base64.b64decode(given["bytes"])
    return found


def state_of(found: lisa.FoundInGroup) -> dict[str, Any]:
    names = ("state", "due_ms", "attempts", "deferrals", "reason")
    return {name: getattr(found, name) for name in names}


def changed(outcomes: Sequence[lisa.KeyOutcome]) -> dict[str, Any]:
    """The outcomes of the messages of a key, and how many were changed."""
    done = sum(one.outcome in ("cancelled", "rescheduled") for one in outcomes)
    results = [{"id": one.id, "outcome": one.outcome} for one in outcomes]
    return {"changed": done, "results": results}


def shown(body: Any) -> dict[str, Any]:
    if isinstance(body, bytes):
        return {"bytes": base64.b64encode(body).decode()}
    return {"body": body}


def held(outcome: object) -> object:
    """The outcome of a call on a delivery. Raises StepFailed if the delivery was not held."""
    if outcome in (False, "stale"):
        raise StepFailed("stale")
    return outcome
