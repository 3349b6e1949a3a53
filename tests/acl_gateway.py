"""The gateway's commands; `acl_scenes` has those of the other roles."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.gateway.push_targets import Target
from tests.gateways import Gateway
from tests.servers import wait_until

if TYPE_CHECKING:
    from tests.acl_stage import Stage

PUSHES = """
lisa-delay-queue:
  gateway-server:
    push-allow: ["127.0.0.0/8"]
"""


ORDERS = "/v1/topics/orders"
POLL = "/v1/topics/poll"
CAMELLIA = "/camellia/delayQueue"
WELL = (200, 201, 202, 204, 303)


class Caller:
    """Calls a gateway and accepts only successful responses."""

    def __init__(self, gateway: Gateway) -> None:
        self.url = gateway.url
        self.client = gateway.client

    def ask(self, method: str, path: str, *, ok: tuple[int, ...] = WELL, **more: Any) -> Any:
        answer = self.client.request(method, path, **more)
        assert answer.status_code in ok, (method, path, answer.status_code, answer.text)
        return answer

    def get(self, *paths: str) -> None:
        for path in paths:
            self.ask("GET", path)

    def post(self, path: str, body: object = None) -> Any:
        return self.ask("POST", path, json=body or {})


def serve(stage: Stage) -> None:
    """Use the HTTP API, the compatible APIs, the page, a push, and the metrics."""
    cast = stage.cast().declare(retry_delays="0", journal="1")
    other = stage.cast(group="h").declare()
    for number in range(9):
        cast.send(number, message_id=f"m{number}", ttl_ms=60_000)
    for one in (cast, other):
        for entry in one.take(3):
            one.discard(entry)
    cast.send(message_id="later", delay_ms=60_000)
    stage.cast("limited").declare(capacity="2")
    with (
        tempfile.TemporaryDirectory() as directory,
        Target() as target,
        stage.watched(),
        Gateway(stage.url, "--allow-actions", config=PUSHES, directory=Path(directory)) as gateway,
    ):
        caller = Caller(gateway)
        send(caller)
        deliver(caller)
        push(caller, target)
        operate(caller)
        speak_as_earlier_systems(caller)


def send(caller: Caller) -> None:
    """Send, inspect, cancel."""
    later = {"body": 1, "id": "a", "delay_ms": 60_000}
    caller.post(f"{ORDERS}/messages", later)
    caller.post(f"{ORDERS}/messages:batch", {"messages": [{"body": 1, "id": "b"}, {"body": 2}]})
    caller.post("/v1/topics/limited/messages", {"body": 1, "delay_ms": 60_000})
    caller.get(*(f"{ORDERS}/messages/{one}" for one in ("a", "m0", "later")))
    for state in ("waiting", "ready", "in_flight", "retry", "garbage"):
        path = f"{ORDERS}/messages?state={state}&limit=1"
        if cursor := caller.ask("GET", path).json()["cursor"]:
            caller.get(f"{path}&cursor={cursor}")
    caller.ask("PATCH", f"{ORDERS}/messages/a", json={"delay_ms": 90_000})
    caller.post(f"{ORDERS}/messages/a/fire")
    caller.ask("DELETE", f"{ORDERS}/messages/a")
    caller.post(f"{ORDERS}/messages", later | {"on_duplicate": "replace"})


def deliver(caller: Caller) -> None:
    """Pull, settle, wait for a message."""
    wanted = {"max": 5, "group": "g", "wait_ms": 100, "ack_timeout_ms": 30_000}
    taken = caller.post(f"{ORDERS}/pull", wanted).json()["deliveries"]
    for verb, one in zip(("extend", "ack", "retry", "release"), taken, strict=False):
        caller.post(f"{ORDERS}/messages/{one['id']}/{verb}", {"receipt": one["receipt"]})
    caller.post(f"{POLL}/groups", {"group": "g"})
    wait = {"json": {"wait_ms": 20_000}, "timeout": 30}
    poll = threading.Thread(target=httpx.post, args=(f"{caller.url}{POLL}/pull",), kwargs=wait)
    poll.start()
    time.sleep(0.3)
    caller.post(f"{POLL}/messages", {"body": 1})
    poll.join()
    caller.ask("POST", "/v1/topics/fresh/pull", json={"wait_ms": 50}, ok=(200, 204, 409))


def push(caller: Caller, target: Target) -> None:
    """Have the gateway push messages."""
    caller.ask("PUT", f"{POLL}/push", json={"url": target.url, "group": "g"})
    caller.post(f"{POLL}/messages", {"body": "pushed"})
    wait_until(lambda: target.received)
    caller.get(f"{POLL}/push")
    caller.ask("DELETE", f"{POLL}/push?group=g")


def operate(caller: Caller) -> None:
    """Operate: garbage, options, groups, the page, and metrics."""
    caller.get(f"{ORDERS}/garbage?group=g&reason=no")
    caller.post(f"{ORDERS}/garbage:requeue", {"group": "g", "ids": ["m1"]})
    for group in "gh":
        caller.post(f"{ORDERS}/garbage:purge", {"group": group, "all": True})
    caller.get(ORDERS, f"{ORDERS}/options", f"{ORDERS}/groups")
    caller.get("/v1/topics", "/v1/consumers", "/v1/managers", "/metrics", "/healthz")
    caller.ask("PATCH", f"{ORDERS}/options", json={"retention": "5m"})
    caller.post(f"{ORDERS}/pause")
    caller.post(f"{ORDERS}/resume")
    with caller.client.stream("GET", f"{ORDERS}/events") as stream:
        next(stream.iter_lines())
    page = "/topics/orders"
    caller.get("/", "/consumers", "/managers", page, f"{page}?ahead=minutes", f"{page}/garbage")
    caller.get(
        f"{page}/garbage?group=h&reason=no&kind=no", "/search?q=m&in=id", "/search?q=m&in=text"
    )
    caller.get(f"{page}/messages", f"{page}/messages/m4", "/search?q=m4")
    caller.ask("DELETE", f"{ORDERS}/groups/h")
    daily = f"{ORDERS}/schedules/daily"
    caller.ask("PUT", daily, json={"body": 1, "cron": "@daily"})
    caller.get(f"{ORDERS}/schedules", daily, f"{daily}/next")
    caller.get(f"{page}/schedules", f"{page}/schedule?name=daily")
    caller.get(f"{page}/schedule/edit?name=daily")
    for verb in ("pause", "resume", "run"):
        caller.post(f"{daily}/{verb}")
    caller.post(f"{daily}/backfill", {"from_ms": 1_760_000_000_000, "to_ms": 1_760_086_400_000})
    caller.ask("DELETE", daily)
    caller.post("/v1/topics/passing/messages", {"body": 1, "delay_ms": 60_000})
    caller.ask("DELETE", "/v1/topics/passing?confirm=passing")


def speak_as_earlier_systems(caller: Caller) -> None:
    """Use the wire formats of camellia, mykit-delay and delay-queue."""
    one = {"topic": "old", "msgId": "c1"}
    times = {"delayMillis": 60_000, "ttlMillis": 60_000}
    pull = {"topic": "old", "batch": 1, "ackTimeoutMillis": 1000}
    for name, form in (
        ("sendMsg", one | times | {"msg": "x"}),
        ("getMsg", one),
        ("pullMsg", pull),
        ("deleteMsg", one | {"release": "true"}),
    ):
        caller.ask("POST", f"{CAMELLIA}/{name}", data=form)
    caller.get(*(f"{CAMELLIA}/{name}" for name in ("getTopicInfoList", "getMonitorData")))
    caller.get(f"{CAMELLIA}/metrics", f"{CAMELLIA}/getTopicInfo?topic=old")
    job = {"topic": "job", "body": "b"}
    ids = [caller.post("/mykit/push", job | {"delay": ms}).json()["data"] for ms in (0, 60_000)]
    caller.get(
        "/mykit/get/job?timeout=500", f"/mykit/finish?id={ids[0]}", f"/mykit/delete?id={ids[1]}"
    )
    caller.get("/mykit/clearAll")
    due = str(time.time_ns() // 1_000_000)
    form = {"topic": "dq", "delayTime": due, "ttrTime": "60", "message": "{}"}
    ids = [caller.ask("POST", "/delay-queue/push", data=form).json()["id"] for _ in range(2)]
    caller.get("/delay-queue/pop/dq")
    for name, message_id in zip(("finish", "delete"), ids, strict=True):
        caller.ask("POST", f"/delay-queue/{name}", data={"id": message_id})
