"""How fast the archive is: `python benchmarks/pipeline/archive.py [EVENTS] [SECONDS]`.

Two figures on `local[2]` and an embedded server, one JSON document:

- catching up with EVENTS (default 2,000,000; lives of four events, bodies of 100 bytes) that wait
  in the journal: events a second after the first batch, the last fold included and not;
- keeping up with 5,000 events a second for SECONDS (default 60): the largest lag of a batch behind
  its last event, which must not grow. Whoever writes the events takes part of the same machine.

`memory_mib` is the most that the driver's Python, its JVM and the workers held at one time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import redis

from benchmarks.pipeline.memory import Peak
from lisa.core.envelope import encode_head, encode_headers, encode_tail
from lisa.core.keys import Keys
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.archive import Progress, archive

RATE = 5_000
CATCH_UP = 50_000
MOST_MIB = 3 * 1024
TOPIC = "orders"
TAIL = encode_tail({"order": 123456, "note": "x" * 74}, encode_headers(None))
STATES = ("sent", "ready", "in_flight", "acked")


def fill(url: str, first: int, events: int, *, rate: float | None = None) -> None:
    """Write that many events, of messages from `first` on; at a rate, or as fast as it goes."""
    client = redis.Redis.from_url(url)
    keys = Keys().topic(TOPIC)
    client.zadd(Keys().topics, {TOPIC: 1})
    client.hset(keys.options, "journal", "1")
    began = time.monotonic()
    for start in range(first, first + events, 2_000):
        pipe = client.pipeline(transaction=False)
        for number in range(start, start + 2_000):
            pipe.execute_command("XADD", keys.events, "*", *_fields(number))
        pipe.hset(keys.stats, "journaled", start + 1_999)
        pipe.execute()
        if rate is not None:
            ahead = (start + 2_000 - first) / rate - (time.monotonic() - began)
            time.sleep(max(0.0, ahead))
    client.close()


def _fields(number: int) -> list[Any]:
    """The fields of one event: 500 messages live at a time, each through its four states."""
    block, place = divmod(number - 1, 2_000)
    state, message = STATES[place // 500], block * 500 + place % 500
    due = int(time.time() * 1000)
    fields: list[Any] = [
        "n", number, "actor", "consumer@host-1:4711", "id", f"0Q7zUEEpSsz28g{message:08}",
        "state", state, "group", "" if state == "sent" else "lisa",
        "attempt", 0 if state == "sent" else 1, "due", due,
    ]  # fmt: skip
    if state == "sent":
        fields += ["envelope", encode_head(f"{message:08}"[-8:]) + TAIL]
    elif state == "in_flight":
        fields += ["late", 1500]
    elif state == "acked":
        fields += ["end", 1]
    return fields


def main(events: int, seconds: int) -> dict[str, Any]:
    """Measure."""
    spark = spark_session(app="benchmark", master="local[2]")
    spark.range(1).count()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as where, Peak() as memory:
        fill(server.url, 1, events)
        told: list[tuple[float, Progress]] = []

        def tell(one: Progress) -> None:
            told.append((time.monotonic(), one))

        archive(spark, where, url=server.url, once=True, progress=tell)
        ended = time.monotonic()
        counted = sum(one.events for _, one in told[1:])
        took = told[-1][0] - told[0][0]
        caught = counted / max(took, 1e-9)
        whole = counted / max(ended - told[0][0], 1e-9)
        told.clear()
        source = subprocess.Popen([
            sys.executable, __file__, "--fill", server.url, str(events + 1), str(RATE * seconds),
        ])  # fmt: skip
        stop = threading.Event()

        def end() -> None:
            source.wait()
            time.sleep(8)  # a batch more
            stop.set()

        threading.Thread(target=end).start()
        archive(
            spark, where, url=server.url, interval=timedelta(seconds=5), progress=tell, stop=stop
        )
    spark.stop()
    lags = [one.lag_ms or 0 for _, one in told]
    kept = sum(one.events for _, one in told)
    return {
        "benchmark": "archive", "events": events, "catch_up_per_second": round(caught),
        "with_fold_per_second": round(whole), "ratio": round(caught / CATCH_UP, 2),
        "kept_up_events": kept, "kept_up": round(kept / (RATE * seconds), 3),
        "batch_seconds": [round(one.seconds, 2) for _, one in told],
        "lags_ms": lags, "memory_mib": round(memory.mib),
        "passed": caught >= CATCH_UP and kept >= RATE * seconds and memory.mib <= MOST_MIB,
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), rate=RATE)
    else:
        numbers = [int(one) for one in sys.argv[1:]]
        print(json.dumps(main(*(numbers + [2_000_000, 60][len(numbers) :]))))
