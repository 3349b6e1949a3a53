"""All roles as processes on one topology, with records kept outside of Redis."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from lisa import Producer
from tests.cluster.sender import DELAY_S
from tests.servers import Process, Processes, wait_until

WATCHED_S = 2.0
SETTLED_WITHIN_S = 2.0
"""After a failover lateness is normal again by then."""
BUSY = 4.0
"""A load of each core above which the machine has more to do than tests of its own."""

ACK_TIMEOUT_S = 2
RETRIES = ", ".join(["0s"] * 3 + ["1s"] * 10)
REDELIVERED_WITHIN = timedelta(seconds=30)
"""The last are handled by then, also those whose first delivery a failover swallowed."""

SHOP = """
import os, time
from lisa import Consumer
file = os.open({ledger!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
consumer = Consumer(group="g", concurrency=4)
def handle(message):
    os.write(file, f"{{message.topic}} {{message.id}} {{message.due_ms}} "
                   f"{{time.time()}} {{message.attempt}}\\n".encode())
for topic in {topics!r}:
    consumer.subscribe(topic, handle)
"""


def busyness() -> float:
    """The load per core; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def latest_s(normal: float) -> float:
    """The maximum lateness that counts as on time; starting processes add some delay."""
    return 2 * normal + 0.1 * busyness()


class Handled(NamedTuple):
    """One delivery to a handler, by the machine's clock."""

    topic: str
    id: str
    due: float
    at: float
    attempt: int

    @property
    def late_s(self) -> float:
        return self.at - self.due


class Sent(NamedTuple):
    """The senders' records: times by `topic id`, and errors."""

    tried: dict[str, float]
    confirmed: dict[str, float]
    refused: list[str]


class Company:
    """Two managers, a consumer and a sender, all at work on topics that a manager declares."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        topics: Sequence[str],
        url: str | Mapping[str, str],
        *,
        replicas: int = 1,
        ports: Sequence[int] = (),
        module: str = "shop",
    ) -> None:
        """`url`: one for all roles, or a mapping from manager, consumer and producer.

        replicas: number required to confirm a message; 0: the primary is enough.
        ports: for the health of both managers and the consumer, if any.
        module: the name under which `shop.py` in the directory is imported.
        """
        roles = ("manager", "consumer", "producer")
        urls = dict.fromkeys(roles, url) if isinstance(url, str) else url
        self.topics = list(topics)
        self._url = urls["producer"]
        self._sent, self._handled = directory / "sent", directory / "handled"
        shop = SHOP.format(ledger=str(self._handled), topics=self.topics)
        (directory / "shop.py").write_text(shop)
        options = f"group: g, ack-timeout: {ACK_TIMEOUT_S}s, retry-delays: [{RETRIES}]"
        groups = "".join(f"    - {{topic: {name}, {options}}}\n" for name in topics)
        settings = directory / "manager.yml"
        settings.write_text(f"lisa-delay-queue:\n  groups:\n{groups}")

        def start(role: str, number: int, *arguments: str) -> Process:
            http = ["--http", f"127.0.0.1:{ports[number]}"] if ports else []
            command = ["-m", f"lisa.cli.{role}", *arguments, "--redis", urls[role], *http]
            return processes.start(*command)

        self.managers = [start("manager", n, "--config", str(settings)) for n in range(2)]
        self.consumer = start("consumer", 2, module)
        sender = ("-m", "tests.cluster.sender", self._url, str(self._sent), str(replicas))
        self.sender = processes.start(*sender, *topics)
        self._wait_until_at_work()

    def _wait_until_at_work(self) -> None:
        try:
            wait_until(
                lambda: {one.topic for one in self.handled()} == set(self.topics),
                timeout=timedelta(seconds=90),
            )
        except AssertionError as error:
            raise AssertionError(self.said()) from error

    def handled(self) -> list[Handled]:
        if not self._handled.exists():
            return []
        rows = [line.split() for line in self._handled.read_text().splitlines()]
        return [
            Handled(row[0], row[1], int(row[2]) / 1000, float(row[3]), int(row[4]))
            for row in rows
            if len(row) == 5
        ]

    def sent(self) -> Sent:
        found = Sent({}, {}, [])
        if not self._sent.exists():
            return found
        for line in self._sent.read_text().splitlines():
            what, topic, message_id, at, *error = line.split(maxsplit=4)
            name = f"{topic} {message_id}"
            if what == "try":
                found.tried[name] = float(at)
            elif what == "sent":
                found.confirmed[name] = float(at)
            else:
                took_s = float(at) - found.tried[name]
                found.refused.append(f"{name} after {took_s:.1f} s: {error}")
        return found

    def was_handled(self, topic: str, since: float) -> bool:
        """True if a message of a topic that was due after a given time was handled."""
        return any(one.topic == topic and one.due > since for one in self.handled())

    def confirmed_since(self, since: float) -> set[str]:
        """The topics with a send confirmed by replicas after a given time."""
        sure = self.sent().confirmed.items()
        return {name.partition(" ")[0] for name, at in sure if at > since and " p-" not in name}

    def watch(self) -> float:
        began = time.time()
        time.sleep(WATCHED_S)
        return self.late_s(began)

    def late_s(
        self, since: float, until: float = math.inf, topics: Sequence[str] | None = None
    ) -> float:
        """The 95th percentile of first attempts' lateness, for messages due in an interval."""
        found = sorted(
            one.late_s
            for one in self.handled()
            if since <= one.due < until and one.attempt == 1 and (not topics or one.topic in topics)
        )
        assert len(found) > 20, f"nearly nothing was handled: {len(found)}\n{self.said()}"
        return found[len(found) * 95 // 100]

    def is_soon_normal(
        self,
        before: float,
        recovered: float,
        topics: Sequence[str] | None = None,
        *,
        beside: Sequence[str] = (),
    ) -> None:
        """Check that lateness is normal again within two seconds.

        Normal is the lateness before or afterwards, because the machine may be busier by now, or
        that of the topics `beside`, which had no fault, at the same time, because the machine may
        have been busy just then. On overloaded cores the time limit grows with the load.
        """
        back = recovered + SETTLED_WITHIN_S * max(1.0, busyness() / BUSY)
        end = back + 2 * WATCHED_S
        time.sleep(max(0.0, end + DELAY_S - time.time()))
        seen = self.late_s(back, back + WATCHED_S, topics)
        normal = max(before, self.late_s(back + WATCHED_S, end, topics))
        if beside:
            normal = max(normal, self.late_s(back, back + WATCHED_S, beside))
        late = f"late by {seen} s {back - recovered:.1f} s after, normal {normal} s"
        assert seen < latest_s(normal), f"{late}\n{self.said()}"

    def close(self, *, may_refuse: bool = False, may_lose: bool = True) -> None:
        """Stop the sender and check that messages confirmed by replicas were handled.

        may_refuse: allow refused sends, for topics away for longer than a producer's patience.
        may_lose: allow the loss of messages that the primary alone has confirmed.
        """
        assert self.sender.stop() == 0, self.sender.output
        sent = self.sent()
        assert may_refuse or sent.refused == [], f"{sent.refused[:9]}\n{self.said()}"
        self.check([name for name in sent.confirmed if not may_lose or " p-" not in name])

    def check(self, sure: Sequence[str]) -> None:
        """Check that these messages were handled, none was early, and all roles run."""
        assert len(sure) > 100
        if absent := self.missing(sure, REDELIVERED_WITHIN):
            with Producer(self._url) as producer:
                rows = [f"{name}: {producer.get(*name.split(' ', 1))}" for name in absent[:20]]
            raise AssertionError("\n".join([f"{len(absent)} missing:", *rows, self.said()]))
        assert all(role.alive for role in [*self.managers, self.consumer]), self.said()
        assert [one for one in self.handled() if one.late_s < 0] == []

    def missing(self, wanted: Sequence[str], within: timedelta) -> list[str]:
        """The `topic id`s that no handler has received within the given time."""
        ends = time.monotonic() + within.total_seconds()
        while True:
            seen = {f"{one.topic} {one.id}" for one in self.handled()}
            absent = [name for name in wanted if name not in seen]
            if not absent or time.monotonic() > ends:
                return absent
            time.sleep(0.05)

    def said(self) -> str:
        roles = [*self.managers, self.consumer, self.sender]
        return "\n".join(f"--- {role.pid}\n{role.output}" for role in roles)
