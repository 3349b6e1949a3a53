"""Measures an archive of many journals: `python benchmarks/pipeline/journals.py [JOURNALS]`.

Archives JOURNALS topics (default 1,000), each with a journal of its own, continuously on `local[2]`
with an embedded server. Then adds two events to each of them, waits until they are archived, and
repeats this five times. Prints one JSON document: seconds of a batch, and seconds from the last
event to the end of its batch, which include up to a second until the next batch starts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import redis

from lisa.core.model.keys import Keys
from lisa.embedded import EmbeddedServer
from lisa.pipeline import spark_session
from lisa.pipeline.jobs.archive import Progress, archive

ROUNDS, OF_EACH = 5, 2


class Writer:
    """Adds events to every journal once all earlier ones are archived."""

    def __init__(self, url: str, journals: int, stop: threading.Event) -> None:
        self._client = redis.Redis.from_url(url)
        self._keys = [Keys().topic(f"topic-{number:04}") for number in range(journals)]
        self._stop, self._number, self._archived = stop, 0, 0
        self._written_at = 0.0
        self.batches: list[float] = []
        self.delays: list[float] = []
        topics = {f"topic-{number:04}": 1 for number in range(journals)}
        self._client.zadd(Keys().topics, topics)
        self._add()

    def told(self, batch: Progress) -> None:
        """Called after each batch."""
        self._archived += batch.events
        if self._archived < self._number * len(self._keys):
            return
        self.batches.append(batch.seconds)
        self.delays.append(time.monotonic() - self._written_at)
        if len(self.batches) > ROUNDS:
            self._stop.set()
        else:
            self._add()

    def _add(self) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for keys in self._keys:
                pipe.hset(keys.options, "journal", "1")
                pipe.hset(keys.stats, "journaled", self._number + OF_EACH)
                for number in range(self._number + 1, self._number + OF_EACH + 1):
                    pipe.execute_command("XADD", keys.events, "*", *_fields(number))
            pipe.execute()
        self._number += OF_EACH
        self._written_at = time.monotonic()


def _fields(number: int) -> list[Any]:
    pairs = {"n": number, "actor": "producer@bench:1", "id": f"m{number}", "state": "cancelled"}
    return [
        part for pair in (pairs | {"group": "", "attempt": 0, "end": 1}).items() for part in pair
    ]


def main(journals: int) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    spark = spark_session(app="benchmark", master="local[2]")
    stop = threading.Event()
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as where:
        writer = Writer(server.url, journals, stop)
        archive(
            spark,
            where,
            url=server.url,
            interval=timedelta(seconds=1),
            progress=writer.told,
            stop=stop,
        )
    spark.stop()
    return {
        "journals": journals,
        "events_per_batch": OF_EACH * journals,
        "batch_seconds": round(statistics.median(writer.batches[1:]), 2),
        "delay_seconds": round(statistics.median(writer.delays[1:]), 2),
        "all_batch_seconds": [round(one, 2) for one in writer.batches],
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)))
