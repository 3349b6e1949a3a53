"""Scenarios for the roles that send, handle and move messages."""

import math
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import keyed_id
from lisa.core.model.recurring.definition import ScheduleOptions, define
from lisa.core.store import schedules
from lisa.core.store.presence import ConsumerPresence, ManagerPresence
from lisa.core.transitions.change import Reschedule
from lisa.embedded.server import free_port
from tests.faults.kill_lives import RETRY_DELAYS, Life

MINUTE_MS = 60_000


class ProducerLife(Life):
    """A producer works through its list and exits; others promote and consume."""

    role = "producer"

    def prepare(self) -> None:
        sent = [f"{kind}-{n}" for kind, count in (("many", 5), ("stream", 3)) for n in range(count)]
        self.cast.configure(order="continue")
        self.ends(["soon", "moved", "fired", "replaced", *sent], "acked")
        self.ends(["taken-back", "many-taken-back-0", "many-taken-back-1"], "cancelled")
        ends = {"in-order": "012", "moved": "0", "fired": "0", "over": "01"}
        for key, own_ids in ends.items():
            state = "cancelled" if key == "over" else "acked"
            self.ends([keyed_id(key, own) for own in own_ids], state)
        self.ends([keyed_id("debounced", "~1")], "acked")
        self.ends([keyed_id("k", "~1")], "cancelled")

    def live(self) -> None:
        self.until(self.replace)
        self.until(self.are_all_at_an_end)

    def turn(self) -> None:
        super().turn()
        self.consume()

    def check(self) -> None:
        super().check()
        lines = (self.directory / "confirmed").read_text().split("\n")
        sent = {one for line in lines for one in line.split(" ") if one}
        counts = Counter(one["id"] for one in self.handled if one["id"] in sent)
        # Including the message with a generated id.
        assert sent - set(self.ends_as) - counts.keys() == set()
        # `replace` may send it again after the first message was handled.
        assert {one for one, count in counts.items() if count > 1} <= {"replaced"}


class AsyncProducerLife(ProducerLife):
    role = "asyncio producer"


class ManagerLife(Life):
    """A manager on a topic with work for each service."""

    role = "manager"
    said = " runs on "

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.put_off = ""
        self.others = [self.cast.on(name) for name in ("narrow", "unlisted")]

    def order(self) -> dict[str, Any]:
        config = self.directory / "manager.yml"
        topic = f"group: g, ack-timeout: 400ms, retry-delays: '{RETRY_DELAYS}'"
        config.write_text(f"""
lisa-delay-queue:
  manager-server:
    crontab-clean-stream: '0/1 * * * * ?'
    crontab-process-pending-message: '0/1 * * * * ?'
    crontab-sweep: '0/1 * * * * ?'
  groups:
    - {{topic: orders, {topic}, journal: true, journal-max: 5, key-limits: {{k: {{weight: 2}}}}}}
    - {{topic: declared, {topic}}}
""")
        return {"config": str(config)}

    def prepare(self) -> None:
        cast = self.cast
        cast.configure(journal="1", journal_max="5")
        self.ends([cast.send(ttl_ms=1)], "expired")  # ready
        self._in_hands_of_the_dead()
        self._foreign_hands()
        self._of_long_ago()
        self.ends([cast.send_due(ttl_ms=1) for _ in range(2)], "expired")  # waiting
        self.ends([cast.send_late("*;1000,skip") for _ in range(2)], "skipped")
        self.ends([cast.send_late("*;1000,garbage")], "garbage")
        self.ends([cast.send_due() for _ in range(5)], "acked")
        self.ends([cast.send(delay_ms=500) for _ in range(3)], "acked")
        self._in_lanes()
        self._in_other_topics()
        self._at_a_tick()

    def _in_lanes(self) -> None:
        """Messages behind one that a dead consumer has, and one that expires there."""
        self.cast.configure(order="continue", key_rate="100,1000,2")
        rest = [keyed_id("k", f"{n}") for n in range(1, 4)]
        self.ends([self.cast.send(message_id=one) for one in rest], "acked")
        self.ends([self.cast.send(message_id=keyed_id("k", "late"), ttl_ms=1)], "expired")

    def _at_a_tick(self) -> None:
        """A schedule whose only occurrence the manager creates."""
        cast, tick = self.cast, 0
        while tick <= cast.now_ms():  # a busy machine may define it too late
            tick = cast.now_ms() + 300
            only = ms_datetime(tick)
            options = ScheduleOptions(every="1h", start=only, until=only, overlap="skip")
            with suppress(InvalidMessage):  # refused, because it is in the past
                cast.store.drive(
                    schedules.put(cast.store, cast.topic, f"to-{tick}", define(1, options))
                )
        self.ends([f"to-{tick}@{tick}"], "acked")

    def _in_hands_of_the_dead(self) -> None:
        """Deliveries of a dead consumer: to be retried, or without attempts left."""
        cast = self.cast
        self.ends([cast.send() for _ in range(3)], "acked")
        self.ends([cast.send(policy="")], "garbage")
        self.put_off = cast.send(policy="600000")
        self.ends([self.put_off, cast.send(message_id=keyed_id("k", "0"))], "acked")
        entries = cast.take(consumer="dead")
        assert len(entries) == 6 + 1  # including the one past its ttl

    def _foreign_hands(self) -> None:
        """A foreign entry, and a message whose entry was deleted."""
        cast, ask = self.cast, self.cast.store.ask
        foreign = ask("XADD", cast.own.ready, "*", "what", "junk")
        assert cast.read(consumer="dead")
        ask("XACK", cast.own.ready, cast.group, foreign)
        lost = cast.send()
        ask("XDEL", cast.own.ready, ask("HGET", cast.own.entries, lost))
        self.ends([lost], "acked")

    def _of_long_ago(self) -> None:
        """Names and records of dead consumers, last year's garbage, an unused topic."""
        cast, ask = self.cast, self.cast.store.ask
        old = cast.send()
        cast.discard(cast.take(1)[0])
        ask("ZADD", cast.own.garbage, "XX", 1_000, old)
        self.ends([old], "purged")
        ask("XGROUP", "CREATECONSUMER", cast.own.ready, cast.group, "gone")
        self._record(ConsumerPresence(name="gone", topic="orders", group="g", seen_ms=1))
        self._record(ConsumerPresence(name="groupless", topic="orders", seen_ms=1))
        manager = ManagerPresence(name="gone", seen_ms=1)
        ask("HSET", cast.store.keys.managers, "gone", msgspec.json.encode(manager))
        ask("ZADD", cast.store.keys.topics, 1, "idle")

    def _record(self, one: ConsumerPresence) -> None:
        store = self.cast.store
        store.ask("HSET", store.keys.topic(one.topic).consumers, one.name, msgspec.json.encode(one))

    def _in_other_topics(self) -> None:
        """A full topic, an unlisted topic, and a topic whose consumer waits for a group."""
        narrow, unlisted = self.others
        narrow.declare(max_ready="1")
        unlisted.declare()
        for cast in self.others:
            for _ in range(3):
                cast.send_due()
        ask, keys = self.cast.store.ask, self.cast.store.keys
        ask("ZREM", keys.topics, "unlisted")
        ask("ZADD", keys.topics, self.cast.now_ms(), "asking")
        soon = self.cast.now_ms() + MINUTE_MS
        self._record(ConsumerPresence(name="c", topic="asking", seen_ms=soon, state="waiting"))

    def turn(self) -> None:
        self.consume()
        narrow, unlisted = self.others
        if self._is_listed():  # a manager finds an unlisted topic only while it holds messages
            self.consume(unlisted)
        if self.has_come_by("after", "HGET options"):  # called where a topic is full, too
            self.consume(narrow)
        if self.cast.state(self.put_off) == "retry":  # a manager has reclaimed it
            self.cast.store.call(Reschedule(self.cast.topic, [(self.put_off, "+0")]))

    def live(self) -> None:
        self.until(self.are_all_at_an_end)
        self.until(self._is_all_done)

    def _is_listed(self) -> bool:
        ask, keys = self.cast.store.ask, self.cast.store.keys
        return ask("ZSCORE", keys.topics, "unlisted") is not None

    def _is_all_done(self) -> bool:
        ask, keys, cast = self.cast.store.ask, self.cast.store.keys, self.cast
        own = keys.topic
        return all(
            (
                ask("HEXISTS", own("declared").groups, "g"),
                ask("HEXISTS", own("asking").groups, "lisa"),
                all(one.stats().get("acked@g") == 3 for one in self.others),
                self._is_listed(),
                ask("ZSCORE", keys.topics, "idle") is None,
                not ask("HEXISTS", keys.managers, "gone"),
                not ask("HEXISTS", cast.keys.consumers, "gone"),
                not ask("HEXISTS", cast.keys.consumers, "groupless"),
                "b'gone'" not in repr(ask("XINFO", "CONSUMERS", cast.own.ready, "g")),
                ask("XLEN", cast.keys.history),
                ask("EXISTS", cast.keys.archived),
            )
        )


CAUSES = {"ack": "fine", "extend": "until-stopped", "retry": "fails", "defer": "deferred"}
"""The body of a message that causes a call."""


class ConsumerLife(Life):
    """A consumer handles messages, and is stopped while a handler runs and others wait."""

    role = "consumer"
    said = "reading for group"
    nap_s = 0.3
    naps = 1
    lanes: Mapping[str, str] = MappingProxyType({"order": "continue", "concurrency": "50"})

    def prepare(self) -> None:
        cast = self.cast
        cast.configure(**self.lanes)
        self.ends([cast.send("fine", ttl_ms=1, message_id="late")], "expired")
        time.sleep(0.003)
        self.ends([cast.send(body) for body in (300, "fails", "again", "deferred")], "acked")
        for key in ("a", "b"):
            for own_id, body in enumerate(("limited", "fails", "fine")):
                self.ends([cast.send(body, message_id=keyed_id(key, f"{own_id}"))], "acked")
        self.ends([cast.send("given-up")], "garbage")
        self.ends([cast.send("fine", window="always")], "acked")
        self.ends([cast.send("fine") for _ in range(60)], "acked")

    def live(self) -> None:
        self.until(self.are_all_at_an_end)
        self.call_as_often()
        while not self._is_stopped_with_full_hands():
            pass  # it reads one by one, at the pace of its handlers
        self.start()
        self.until(self.are_all_at_an_end)
        self.call_as_often()
        self.until(self.is_one_waiting)  # the other case: a blocked read that must be interrupted

    def call_as_often(self) -> None:
        """Give the process to be killed more to do until it makes the call as often as needed.

        A timer extends leases, and settlements that come together share a call: another life may
        have made more calls than this one.
        """
        point = self._visit.point
        if point is None or point.name not in CAUSES:
            return
        while self._is_the_one() and not self.has_come_by(*point):
            ids = [self.cast.send(CAUSES[point.name])]
            self.ends(ids, "acked")
            self.until(lambda: self.has_come_by(*point) or self.are_all_at_an_end())
            self._wake(ids)
            self.until(self.are_all_at_an_end)

    def is_one_waiting(self) -> bool:
        return b"blocked_clients:1" in self.cast.store.ask("INFO", "clients")

    def _is_stopped_with_full_hands(self) -> bool:
        """Stop it if it holds more of the messages due together than its handlers work on."""
        bodies = ["until-stopped"] * self.naps + ["fine"] * 6
        ids = [self.cast.send(body, delay_ms=100) for body in bodies]
        self.ends(ids, "acked")
        first: list[str] = []
        may_wait_until = math.inf

        def are_taken() -> bool:
            nonlocal may_wait_until
            first[:] = self.cast.states(ids[: self.naps + 1])
            if set(first[:-1]) == {"in_flight"} and may_wait_until == math.inf:
                may_wait_until = time.monotonic() + self.nap_s
            if set(first) != {"in_flight"} and time.monotonic() > may_wait_until:
                self._wake(ids)
            return set(first) <= {"in_flight", "acked"}

        self.until(are_taken)
        is_full = set(first) == {"in_flight"}
        if is_full:
            self._stop_one()
        self._wake(ids)  # also messages whose handlers had not started
        return is_full

    def _wake(self, ids: list[str]) -> None:
        """Let handlers return without a stop."""
        for one in ids[: self.naps]:
            (self.directory / one).touch()

    def _stop_one(self) -> None:
        child = self._child
        assert child is not None
        child.signal(signal.SIGTERM)
        assert child.wait() in (0, -signal.SIGKILL), self.output


class AsyncConsumerLife(ConsumerLife):
    role = "asyncio consumer"
    naps = 3
    lanes = MappingProxyType({})


LATER_MS = 600_000
FIRST = {
    "b-0": "extend",
    "b-1": "retry",
    "b-2": "discard",
    "b-3": "release",
    "b-4": "defer",
    "purged": "discard",
    keyed_id("k", "0"): "rest",
}
"""What is done with the first delivery of a message; the others are acked."""
MORE: dict[str, dict[str, Any]] = {
    "retry": {"delay_ms": 20},
    "defer": {"delay_ms": 20},
    "discard": {"discard": True},
    "rest": {"delay_ms": 20, "rests_lane": True},
}
PATHS = {"discard": "retry", "rest": "defer"}


class GatewayLife(Life):
    """Every operation that changes something, each repeated until there is a response."""

    role = "gateway"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.port = free_port()
        self._root = f"http://127.0.0.1:{self.port}"
        self._client = httpx.Client(base_url=f"{self._root}/v1/", timeout=5)
        self._done: set[str] = set()

    def order(self) -> dict[str, Any]:
        return {"port": self.port}

    def prepare(self) -> None:
        """Nothing to do: the requests create the topic."""
        self.ends(["a", *[f"b-{n}" for n in range(5)], "moved", "fired"], "acked")
        self.ends([keyed_id("k", f"{n}") for n in range(2)], "acked")
        self.ends([keyed_id("moved", "0"), keyed_id("fired", "0"), keyed_id("k", "~1")], "acked")
        self.ends(["taken-back", keyed_id("over", "0")], "cancelled")
        self.ends(["purged"], "purged")

    def close(self) -> None:
        self._client.close()
        super().close()

    def ask(self, method: str, path: str, *fine: int, **json: Any) -> httpx.Response:
        """One request, repeated until there is a response; 2xx is always accepted."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            try:
                answers.append(self._client.request(method, path, json=json or None))
            except httpx.TransportError:
                return False
            return answers[-1].status_code != 503

        self.until(answered)
        found = answers[-1]
        assert found.is_success or found.status_code in fine, f"{method} {path}: {found.text}"
        return found

    def live(self) -> None:
        self.ask("POST", "topics/orders/groups", group="other")
        self.ask("PATCH", "topics/orders/options", max_ready=9_000, journal=True)
        self._send()
        self._send_with_keys()
        self.ask("DELETE", "topics/orders/groups/other", 404)
        self.ask("POST", "topics/orders/pause")
        self.ask("POST", "topics/orders/resume")
        self._take()
        history = f"{self._root}/topics/orders/messages/a"  # from the journal
        for path in ("topics/orders", "topics", history):
            self.ask("GET", path)

    def _send(self) -> None:
        send, later = "topics/orders/messages", LATER_MS
        self.ask("POST", send, body=1, id="a", delay_ms=50)
        self.ask("POST", f"{send}:batch", messages=[{"body": n, "id": f"b-{n}"} for n in range(5)])
        for one in ("taken-back", "moved", "fired"):
            self.ask("POST", send, body=1, id=one, delay_ms=later)
        self.ask("DELETE", f"{send}/taken-back")
        self.ask("PATCH", f"{send}/moved", 409, delay_ms=50)
        self.ask("POST", f"{send}/fired/fire", 409)
        self.ask("POST", send, body=1, id="purged")
        self.ask("GET", f"{send}/a")
        self.ask("GET", f"{send}?state=waiting")

    def _send_with_keys(self) -> None:
        """Keys have lanes from the first limit on."""
        send, keys = "topics/orders/messages", "topics/orders/keys"
        self.ask("PUT", f"{keys}/k/limits", concurrency=1)
        for n in range(2):
            self.ask("POST", send, body=1, key="k", id=f"{n}", delay_ms=50)
        for _ in range(2):
            self.ask("POST", send, body=1, key="k", debounce_ms=50)
        for key in ("over", "moved", "fired"):
            self.ask("POST", send, body=1, key=key, id="0", delay_ms=LATER_MS)
        self.ask("DELETE", f"{keys}/over", 404)
        self.ask("PATCH", f"{keys}/moved", delay_ms=50)
        self.ask("POST", f"{keys}/fired/fire")
        self.ask("GET", f"{keys}/k")

    def _take(self) -> None:
        given_up = ("purged", "b-2")
        self.until(lambda: self._has_taken_all() and set(self.cast.states(given_up)) == {"garbage"})
        self.ask("GET", "topics/orders/garbage")
        self.ask("POST", "topics/orders/garbage:purge", ids=["purged"])
        self.ask("POST", "topics/orders/garbage:requeue", ids=["b-2"])
        self.until(lambda: self._has_taken_all() and self.are_all_at_an_end())

    def _has_taken_all(self) -> bool:
        """Pull once and settle the deliveries; true if there were none."""
        pulled = self.ask("POST", "topics/orders/pull", group="g", max=3, wait_ms=200)
        deliveries = pulled.json()["deliveries"]
        for one in deliveries:
            self._settle(one)
        return not deliveries

    def _settle(self, one: dict[str, Any]) -> None:
        """Settle a delivery as planned; if it is too late, the plan applies to the next one."""
        message_id = one["id"]
        self.note_delivery(message_id, one["due_ms"])
        verb = FIRST.get(message_id, "ack")
        if message_id in self._done:
            verb = "ack"
        if self._say(one, verb):
            self._done.add(message_id)
            if verb == "extend":
                self._say(one, "ack")

    def _say(self, one: dict[str, Any], verb: str) -> bool:
        """Settle a delivery; true if it was still leased."""
        more = MORE.get(verb, {})
        path = f"topics/orders/messages/{quote(one['id'])}/{PATHS.get(verb, verb)}"
        return self.ask("POST", path, 409, receipt=one["receipt"], **more).is_success


PRODUCERS, CONSUMERS = (ProducerLife, AsyncProducerLife), (ConsumerLife, AsyncConsumerLife)
LIVES: dict[str, type[Life]] = {
    life.role: life for life in (*PRODUCERS, ManagerLife, *CONSUMERS, GatewayLife)
}
