"""Messages that fall due evenly in many topics at once, for Lisa and for raw commands.

The raw commands run in two processes, a poller and a consumer:

    python -m benchmarks.comparison.lisa_measures.busy_topics poll|consume TOPICS PERIOD_S

Both visit all topics every PERIOD_S, because plain commands cannot tell which topics have work. The
keys are those of Lisa, without index and tombstones, as in `light_load`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench.floor import BODY, CONSUMER, GROUP
from benchmarks.bench.ledger import RECORD, Writer
from benchmarks.bench.measures import Run
from benchmarks.bench.server import BenchServer, client, fresh_server
from benchmarks.bench.work import RawProcesses, lisa_at_work, paced
from benchmarks.comparison.sizes import BusyTopics, FurtherSizes
from lisa.core.model.keys import Keys
from lisa.core.store.store import chunks

NAME = "busy_topics"
AT_ONCE = 500  # topics in one pipeline, and messages of one topic in one command
HEAD_S = 5.0
HEAD_S_PER_TOPIC = 0.004
START_S = 60.0


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: CPU time per message of Redis and of the workers, and lateness."""
    for busy in sizes.busy_topics:
        names = [f"busy-{number:05d}" for number in range(busy.topics)]
        for _ in run.repeats(f"{label(busy)}", slow=True, most=busy.repeats):
            with fresh_server() as server, _raw_at_work(server, names, busy.period_s) as raw:
                _measure(run, busy, "floor", raw)
            with fresh_server() as server, lisa_at_work(server, topics=names) as lisa:
                _measure(run, busy, "lisa", lisa)


def label(busy: BusyTopics) -> str:
    """The last part of a figure's name."""
    return f"{busy.topics:,} topics, {busy.rate:,.0f}/s"


def _measure(run: Run, busy: BusyTopics, subject: str, work: Any) -> None:
    count = int(busy.rate * busy.seconds)
    steady = paced(work, count, busy.rate, HEAD_S + HEAD_S_PER_TOPIC * busy.topics)
    run.results.add(NAME, subject, f"redis {label(busy)}", steady.redis_us, "us")
    for part, spent_us in steady.cpu_us.items():
        run.results.add(NAME, subject, f"{part} {label(busy)}", spent_us, "us")
    run.results.add_lateness(NAME, subject, steady.lateness_us, label(busy))


class _Topic(NamedTuple):
    """The keys of a topic; `body` is a prefix."""

    waiting: str
    ready: str
    body: str


class _Raw:
    """Many topics with raw commands."""

    def __init__(self, server: Any, topics: Sequence[str]) -> None:
        self._client = server
        keys = [Keys("floor").topic(topic) for topic in topics]
        self._topics = [_Topic(one.waiting, one.group(GROUP).ready, one.body("")) for one in keys]
        self._by_stream = {one.ready.encode(): one for one in self._topics}

    def create(self) -> None:
        """Create the streams and their groups."""
        for some in chunks(self._topics, AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for one in some:
                pipeline.xgroup_create(one.ready, GROUP, "0", mkstream=True)
            pipeline.execute()

    def send(self, dues: Sequence[int]) -> None:
        """Send one message per due time (ms), to each topic in turn."""
        step = len(self._topics)
        for first, one in enumerate(self._topics):
            due = {f"{at:013d}{first + step * n:09d}": at for n, at in enumerate(dues[first::step])}
            if due:
                pipeline = self._client.pipeline(transaction=False)
                pipeline.mset({one.body + message: BODY for message in due})
                pipeline.zadd(one.waiting, due)
                pipeline.execute()

    def promote(self) -> None:
        """Move the due messages of each topic to its stream."""
        now_ms = time.time_ns() // 1_000_000
        for some in chunks(self._topics, AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for one in some:
                pipeline.zrangebyscore(
                    one.waiting, "-inf", now_ms, start=0, num=AT_ONCE, withscores=True
                )
            for one, due in zip(some, pipeline.execute(), strict=True):
                for message, score in due:
                    fields = {"id": message, "due": int(score)}
                    pipeline.xadd(one.ready, fields)
                if due:
                    pipeline.zrem(one.waiting, *(message for message, _ in due))
            if len(pipeline):
                pipeline.execute()

    def consume(self, note: Callable[[bytes], None], block_ms: int | None) -> None:
        """Read, note and remove the messages of each topic."""
        for some in chunks(list(self._by_stream), AT_ONCE):
            found = self._client.xreadgroup(
                GROUP, CONSUMER, dict.fromkeys(some, ">"), count=AT_ONCE, block=block_ms
            )
            pipeline = self._client.pipeline(transaction=False)
            for stream, entries in found:
                body = self._by_stream[stream].body
                bodies = [body + fields[b"id"].decode() for _, fields in entries]
                self._client.mget(bodies)
                for _, fields in entries:
                    note(RECORD.pack(int(fields[b"due"]) * 1000, time.time_ns() // 1000))
                pipeline.xack(stream, GROUP, *(entry for entry, _ in entries))
                pipeline.xdel(stream, *(entry for entry, _ in entries))
                pipeline.unlink(*bodies)
            if found:
                pipeline.execute()

    def is_empty(self) -> bool:
        """Whether all streams are empty."""
        pipeline = self._client.pipeline(transaction=False)
        for stream in self._by_stream:
            pipeline.xlen(stream)
        return not any(pipeline.execute())


class _RawAtWork(RawProcesses):
    """The raw poller and consumer."""

    def __init__(self, server: BenchServer, stack: ExitStack, topics: Sequence[str]) -> None:
        self._raw = _Raw(server.client, topics)
        self._raw.create()
        super().__init__(server, stack, topics, self._raw.send)

    def settled(self) -> bool:
        """See `work.AtWork`."""
        return self._raw.is_empty()


@contextmanager
def _raw_at_work(
    server: BenchServer, topics: Sequence[str], period_s: float
) -> Iterator[_RawAtWork]:
    with ExitStack() as stack:
        work = _RawAtWork(server, stack, topics)
        for part in ("poll", "consume"):
            work.start(part, __name__, part, str(len(topics)), str(period_s))
        work.send(20, time.time_ns() // 1_000_000)
        work.ledger.wait(20, START_S, work.check)
        yield work


def main(part: str, topics: str, period_s: str) -> None:
    """Run a raw process until SIGTERM."""
    names = [f"busy-{number:05d}" for number in range(int(topics))]
    period = float(period_s)
    with client(os.environ["LISA_REDIS_URL"]) as server:
        raw = _Raw(server, names)
        if part == "consume":
            path = Path(os.environ["BENCH_LEDGER"]) / f"{os.getpid()}.ledger"
            note = Writer(path).note
            while len(names) <= AT_ONCE:  # one blocking read covers them all
                raw.consume(note, 1_000)
        turn = time.monotonic()
        while True:
            if part == "poll":
                raw.promote()
            else:
                raw.consume(note, None)
            turn = max(turn + period, time.monotonic())
            time.sleep(max(0.0, turn - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
