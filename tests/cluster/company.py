"""All roles as processes on one topology, with records kept outside of Redis."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from lisa import Producer
from tests.servers import Process, Processes, wait_until

PAUSE_S, DELAY_S = 0.006, 0.3
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
        """Seconds after due."""
        return self.at - self.due


@dataclass
class Sent:
    """The senders' records."""

    tried: dict[str, float]
    confirmed: dict[str, float]
    refused: list[str]


class Company:
    """Two managers, a consumer and a sender, on topics that a manager declares."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        topics: Sequence[str],
        urls: Mapping[str, str],
        *,
        replicas: int = 1,
        ports: Sequence[int] = (),
        module: str = "shop",
    ) -> None:
        """`urls`: by role (manager, consumer, producer), or one for all under ''.

        replicas: number required to confirm a message; 0: the primary is enough.
        ports: for the health of both managers and the consumer, if any.
        module: the name under which `shop.py` in the directory is imported.
        """
        self.topics = list(topics)
        self._sent, self._handled = directory / "sent", directory / "handled"
        shop = directory / "shop.py"
        shop.write_text(SHOP.format(ledger=str(self._handled), topics=self.topics))
        settings = directory / "manager.yml"
        settings.write_text(
            "lisa-delay-queue:\n  groups:\n"
            + "".join(
                f"    - {{topic: {name}, group: g, ack-timeout: {ACK_TIMEOUT_S}s, "
                f"retry-delays: [{RETRIES}]}}\n"
                for name in topics
            )
        )

        def url(role: str) -> str:
            return urls.get(role) or urls[""]

        self._url = url("producer")
        http = [["--http", f"127.0.0.1:{port}"] for port in ports] or [[], [], []]
        self.managers = [
            processes.start(
                "-m", "lisa.cli.manager", "--config", str(settings), "--redis", url("manager"), *own
            )
            for own in http[:2]
        ]
        self.consumer = processes.start(
            "-m", "lisa.cli.consumer", module, "--redis", url("consumer"), *http[2]
        )
        self.sender = processes.start(
            "-m",
            "tests.cluster.sender",
            url("producer"),
            str(self._sent),
            str(PAUSE_S),
            str(DELAY_S),
            str(replicas),
            *topics,
        )

    @property
    def roles(self) -> list[Process]:
        """All processes."""
        return [*self.managers, self.consumer, self.sender]

    def handled(self) -> list[Handled]:
        """All deliveries so far, in order."""
        if not self._handled.exists():
            return []
        rows = [line.split() for line in self._handled.read_text().splitlines()]
        return [
            Handled(row[0], row[1], int(row[2]) / 1000, float(row[3]), int(row[4]))
            for row in rows
            if len(row) == 5
        ]

    def sent(self) -> Sent:
        """Attempted and confirmed sends so far: times by `topic id`."""
        found = Sent({}, {}, [])
        if not self._sent.exists():
            return found
        for line in self._sent.read_text().splitlines():
            what, topic, name, at, *rest = line.split(maxsplit=4)
            if what == "try":
                found.tried[f"{topic} {name}"] = float(at)
            elif what == "sent":
                found.confirmed[f"{topic} {name}"] = float(at)
            else:
                took_s = float(at) - found.tried[f"{topic} {name}"]
                found.refused.append(f"{topic} {name} after {took_s:.1f} s: {rest}")
        return found

    def wait_until_at_work(self) -> None:
        """Wait until every topic's messages arrive."""
        try:
            wait_until(
                lambda: {one.topic for one in self.handled()} == set(self.topics),
                timeout=timedelta(seconds=90),
            )
        except AssertionError as error:
            raise AssertionError(self.said()) from error

    def was_handled(self, topic: str, since: float) -> bool:
        """True if a message of a topic that was due after a given time was handled."""
        return any(one.topic == topic and one.due > since for one in self.handled())

    def confirmed_since(self, since: float) -> set[str]:
        """The topics with a send confirmed by replicas after a given time."""
        sure = self.sent().confirmed.items()
        return {name.partition(" ")[0] for name, at in sure if at > since and " p-" not in name}

    def watch(self) -> float:
        """Measure lateness for some time from now."""
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
    ) -> str:
        """Check that lateness is normal again within two seconds; describes the result.

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
        said = (
            f"late by {seen * 1000:.0f} ms {back - recovered:.1f} s after, "
            f"normal {normal * 1000:.0f} ms"
        )
        latest = [
            f"{one.topic} {one.id} due {one.due - recovered:.3f} s after, late by {one.late_s:.3f}"
            for one in self.handled()
            if recovered <= one.due < end and one.late_s > normal
        ]
        assert seen < latest_s(normal), "\n".join([said, *latest, self.said()])
        return said

    def close(self, *, may_refuse: bool = False) -> str:
        """Stop the sender and check that confirmed messages were handled; returns a summary.

        may_refuse: allow refused sends, for topics away for longer than a producer's patience.
        """
        assert self.sender.stop() == 0, self.sender.output
        sent = self.sent()
        sure = [name for name in sent.confirmed if " p-" not in name]
        plain = [name for name in sent.confirmed if " p-" in name]
        assert len(sure) > 100
        assert may_refuse or sent.refused == [], f"{sent.refused[:9]}\n{self.said()}"
        absent = self.missing(sure, REDELIVERED_WITHIN)
        assert absent == [], f"{self._found(absent)}\n{self.said()}"
        lost = self.missing(plain, timedelta(seconds=1))
        assert all(role.alive for role in [*self.managers, self.consumer]), self.said()
        early = [one for one in self.handled() if one.late_s < 0]
        assert early == []
        again = len(self.handled()) - len({(one.topic, one.id) for one in self.handled()})
        return (
            f"{len(sure)} confirmed by replicas, 0 lost; {len(plain)} confirmed by the primary "
            f"alone, {len(lost)} lost{': ' if lost else ''}{' '.join(lost)}; {again} handled again"
        )

    def _found(self, names: Sequence[str]) -> str:
        """The server's data on some `topic id`s."""
        with Producer(self._url) as producer:
            rows = [(name, producer.get(*name.split(" ", 1))) for name in names[:20]]
        return f"{len(names)} missing:\n" + "\n".join(f"{name}: {row}" for name, row in rows)

    def missing(self, wanted: Sequence[str], within: timedelta) -> list[str]:
        """The `topic id`s that no handler has received within the given time."""

        def absent() -> list[str]:
            seen = {f"{one.topic} {one.id}" for one in self.handled()}
            return [name for name in wanted if name not in seen]

        ends = time.monotonic() + within.total_seconds()
        while (left := absent()) and time.monotonic() < ends:
            time.sleep(0.05)
        return left

    def said(self) -> str:
        """The roles' logs."""
        return "\n".join(f"--- {role.pid}\n{role.output}" for role in self.roles)
