"""`python -m benchmarks.coalesce`: sends over debounced keys, and what the handlers get of them.

A window of a quarter of the keys moves over all of them: each key has a second of frequent sends
and then three without any.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import click

from benchmarks.bench.__main__ import clear_settings
from benchmarks.bench.results import Fault
from benchmarks.bench.server import BenchServer, fresh_server
from benchmarks.bench.work import GROUP, QUIET, TOPIC, WorkProcesses, store_on
from benchmarks.table import Figures, Row, show
from lisa import AsyncProducer, Outgoing, Producer
from lisa.admin.groups import add

QUIET_MS, MOST_MS = 300, 800
PERIOD_S, SHARE = 4.0, 0.25
TICK_S = 0.002
"""How often the sender wakes. With 10 ms, messages would fall due just when it sends again, because
both times are multiples of that.
"""
PATIENCE_S = 30.0
FIRST = "first"
"""The key of a message that shows that the roles run."""

PLAIN, PLAIN_RATE = "plain", 100
"""A topic of messages without a key, for comparison, and how many of them are due per second."""


ROWS = (
    Row("coalesce", "sends per second", lambda f: f["rate"]),
    Row("coalesce", "Redis: us per send, all work included", lambda f: f["redis_us"]),
    Row("coalesce", "bursts", lambda f: f["bursts"]),
    Row("coalesce", "handlings per burst, least", lambda f: f["least"], at_least=1),
    Row("coalesce", "handlings per burst, most", lambda f: f["most"], at_most=1),
    Row("coalesce", "bursts not handled with their last body", lambda f: f["wrong"], at_most=0),
    Row(
        "coalesce",
        "ms handled before the quiet time was over, most",
        lambda f: f["early"],
        at_most=0,
    ),
    Row("coalesce", "ms due after max_wait, most", lambda f: f["excess"], at_most=1),
    Row("coalesce", "ms from due to handler, p50", lambda f: f["p50"]),
    Row("coalesce", "ms from due to handler, p99", lambda f: f["p99"]),
    Row("coalesce", "the same of messages without a key, p50", lambda f: f["plain_p50"]),
    Row("coalesce", "the same of messages without a key, p99", lambda f: f["plain_p99"]),
)


class Sent(NamedTuple):
    """One send: its key and number, the times in ms before and after it, and its outcome."""

    key: str
    n: int
    before_ms: int
    after_ms: int
    outcome: str


class Handled(NamedTuple):
    """One handling: the number of the send, the due time in ms, and when it began in us."""

    n: int
    due_ms: int
    at_us: int


def now_ms() -> int:
    """The current time in ms, by the clock that handlers and the server share."""
    return time.time_ns() // 1_000_000


async def send_all(url: str, count: int, keys: int, rate: int) -> list[Sent]:
    """Make single sends in tasks of their own, at a constant rate."""
    chosen, sent = random.Random(7), list[Sent]()
    each, began = max(1, round(rate * TICK_S)), time.monotonic()
    async with AsyncProducer(url) as producer:
        for first in range(0, count, each):
            await asyncio.sleep(max(0.0, began + first / rate - time.monotonic()))
            phase, before_ms = first / rate / PERIOD_S, now_ms()
            numbers = range(first, min(first + each, count))
            names = [f"k{int((phase + SHARE * chosen.random()) * keys) % keys}" for _ in numbers]
            said = await asyncio.gather(
                *(
                    producer.send_one(
                        TOPIC,
                        {"n": n, "pad": "x" * 80},
                        key=key,
                        debounce=f"{QUIET_MS}ms",
                        max_wait=f"{MOST_MS}ms",
                    )
                    for n, key in zip(numbers, names, strict=True)
                )
            )
            after_ms = now_ms()
            sent += [
                Sent(key, n, before_ms, after_ms, one.outcome)
                for n, key, one in zip(numbers, names, said, strict=True)
            ]
    return sent


def send_plain(url: str, seconds: float) -> int:
    """Send messages without a key that fall due from now on; returns how many."""
    chosen, count, first_ms = random.Random(7), round(PLAIN_RATE * seconds), now_ms() + 500
    with Producer(url) as producer:
        dues = (first_ms + int(1000 * seconds * chosen.random()) for _ in range(count))
        producer.send_many(PLAIN, [Outgoing({"n": 0}, at_ms=due_ms) for due_ms in dues])
    return count


def read(folder: Path) -> dict[str, list[Handled]]:
    """The handlings of each key, in order; those of messages without one as of the key `plain`."""
    found: dict[str, list[Handled]] = defaultdict(list)
    for path in folder.glob("*.handled"):
        for line in path.read_text("ascii").splitlines():
            key, *numbers = line.split(" ")
            found[key].append(Handled(*map(int, numbers)))
    for handled in found.values():
        handled.sort(key=lambda one: one.at_us)
    return found


def bursts_of(sent: Sequence[Sent]) -> dict[str, list[list[Sent]]]:
    """The bursts of each key: a send that was accepted begins one."""
    found: dict[str, list[list[Sent]]] = defaultdict(list)
    for one in sent:
        if one.outcome == "accepted":
            found[one.key].append([])
        found[one.key][-1].append(one)
    return found


def judge(sent: Sequence[Sent], handled: dict[str, list[Handled]]) -> Figures:
    """What the handlers got, compared with what was sent."""
    counts, late, early, excess, wrong = list[int](), list[float](), [0], [0], 0
    for key, bursts in bursts_of(sent).items():
        numbers = {one.n: at for at, burst in enumerate(bursts) for one in burst}
        got: dict[int, list[Handled]] = defaultdict(list)
        for one in handled[key]:
            got[numbers[one.n]].append(one)
        for at, burst in enumerate(bursts):
            counts.append(len(got[at]))
            wrong += any(one.n != burst[-1].n for one in got[at])
            for one in got[at]:
                late.append(one.at_us / 1000 - one.due_ms)
                quiet_ms = burst[-1].before_ms + QUIET_MS
                ends_ms = min(quiet_ms, burst[0].before_ms + MOST_MS)
                early.append(ends_ms - one.at_us // 1000)
                excess.append(one.due_ms - burst[0].after_ms - MOST_MS)
    centiles = quantiles(late, n=100)
    plain = quantiles((one.at_us / 1000 - one.due_ms for one in handled[PLAIN]), n=100)
    return {
        "bursts": len(counts),
        "least": min(counts),
        "most": max(counts),
        "wrong": wrong,
        "early": max(early),
        "excess": max(excess),
        "p50": centiles[49],
        "p99": centiles[98],
        "plain_p50": plain[49],
        "plain_p99": plain[98],
    }


def wait_for(count: int, work: WorkProcesses) -> None:
    """Wait until so many messages were handled. Raises Fault."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(map(len, read(work.ledger.folder).values())) < count:
        if time.monotonic() > deadline:
            raise Fault("not all messages were handled in time")
        work.check()
        time.sleep(0.1)


def measure(server: BenchServer, count: int, keys: int, rate: int) -> Figures:
    """Send, wait until all bursts are handled, and compare. Raises Fault."""
    with ExitStack() as stack:
        with closing(store_on(server)) as store:
            for topic in (TOPIC, PLAIN):
                store.drive(add(store, topic, GROUP))
        work = WorkProcesses(server, stack, (TOPIC, PLAIN))
        work.start("manager", "lisa.cli.manager", *QUIET)
        work.start("consumer", "lisa.cli.consumer", *QUIET, "benchmarks.coalesce.handlers")
        with Producer(server.url) as producer:
            producer.send(TOPIC, {"n": -1}, key=FIRST, latest=True)
        wait_for(1, work)
        plain = send_plain(server.url, count / rate)
        before_us, began = server.cpu_us(), time.monotonic()
        sent = asyncio.run(send_all(server.url, count, keys, rate))
        took_s = time.monotonic() - began
        wanted = sum(one.outcome == "accepted" for one in sent)
        wait_for(1 + plain + wanted, work)
        figures = judge(sent, read(work.ledger.folder))
        redis_us = (server.cpu_us() - before_us) / count
        return figures | {"rate": count / took_s, "redis_us": redis_us}


@click.command()
@click.option("--sends", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option("--keys", type=click.IntRange(min=1), default=1_000, show_default=True)
@click.option("--rate", type=click.IntRange(min=1), default=10_000, show_default=True)
def main(sends: int, keys: int, rate: int) -> None:
    """Measure sends over debounced keys; exit code 1 if a bound is missed."""
    clear_settings()
    with fresh_server() as server:
        figures = {"coalesce": measure(server, sends, keys, rate)}
    sys.exit(0 if show(ROWS, figures) else 1)


if __name__ == "__main__":
    main()
