"""Compares one and two standalone workers: `python benchmarks/pipeline/workers.py [ROWS]`.

Starts a standalone master and workers of one core each on loopback addresses, and schedules ROWS
rows (default 500,000, with ids) into an embedded server with one worker, then with two. Prints one
JSON document: whether the server has the same messages, seconds of both runs, and seconds of the
tasks as Spark's event log states them. Both workers, the driver and the server share the machine's
cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import redis

from benchmarks.pipeline.schedule import TOPIC, write_file
from lisa.core.model.keys import Keys
from lisa.embedded import EmbeddedServer
from lisa.pipeline.java import use_java

ADDRESSES = ("127.0.0.2", "127.0.0.3")
STARTS_FOR_S = 300.0


@contextmanager
def cluster(workers: int, folder: Path) -> Iterator[str]:
    """A standalone cluster of so many workers; yields the URL of its master."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    master, running = f"spark://127.0.0.1:{port}", list[subprocess.Popen[bytes]]()

    def start(name: str, address: str, *arguments: str) -> Path:
        log = folder / f"{name}-{address}-{workers}.log"
        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        kind = f"org.apache.spark.deploy.{name.lower()}.{name}"
        command = [str(spark_class), kind, "--host", address, "--webui-port", "0", *arguments]
        environment = os.environ | {"SPARK_LOCAL_IP": address, "SPARK_DAEMON_MEMORY": "256m"}
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=folder)
            )
        return log

    try:
        log = start("Master", "127.0.0.1", "--port", str(port))
        _wait(lambda: "New state: ALIVE" in log.read_text("utf-8"))
        for address in ADDRESSES[:workers]:
            start("Worker", address, "--cores", "1", "--memory", "1g", master)
        _wait(lambda: log.read_text("utf-8").count("Registering worker") == workers)
        yield master
    finally:
        for one in reversed(running):
            one.terminate()
        for one in running:
            one.wait()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTS_FOR_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the standalone cluster did not start")
        time.sleep(0.1)


def driver(master: str, url: str, rows: str, events: str) -> float:
    """The driver's program: seconds of the job, after a small one for warming up."""
    from lisa.pipeline import schedule, spark_session

    settings = {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": Path(events).as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.lisa.executorsWithin": "5m",
        "spark.sql.files.maxPartitionBytes": "8m",
    }
    spark = spark_session(app="benchmark", master=master, settings=settings)
    table = spark.read.parquet(rows)
    schedule(table.limit(5_000), url=url, topic="warm")
    began = time.perf_counter()
    schedule(table, url=url, topic=TOPIC)
    took = time.perf_counter() - began
    spark.stop()
    return took


def task_seconds(events: Path) -> list[float]:
    """Seconds of the tasks that sent the rows: those of the last stage."""
    ended = [
        one
        for line in next(events.iterdir()).read_text("utf-8").splitlines()
        if (one := json.loads(line))["Event"] == "SparkListenerTaskEnd"
    ]
    last = max(one["Stage ID"] for one in ended)
    infos = [one["Task Info"] for one in ended if one["Stage ID"] == last]
    return [round((one["Finish Time"] - one["Launch Time"]) / 1000, 1) for one in infos]


def digest(url: str) -> str:
    """A digest of the ids, due times and bodies of all waiting messages."""
    client, keys = redis.Redis.from_url(url), Keys().topic(TOPIC)
    made = hashlib.blake2b(digest_size=16)
    waiting: Any = client.zrange(keys.waiting, 0, -1, withscores=True)
    for start in range(0, len(waiting), 10_000):
        some = waiting[start : start + 10_000]
        bodies: Any = client.mget([keys.body(name.decode()) for name, _ in some])
        for (name, due), body in zip(some, bodies, strict=True):
            made.update(b"%b %d %b\n" % (name, int(due), body[10:]))  # without the send token
    client.close()
    return f"{len(waiting)} {made.hexdigest()}"


def run(workers: int, rows: Path, folder: Path) -> dict[str, Any]:
    """Schedule all rows with so many workers; returns the figures."""
    events = folder / f"events-{workers}"
    events.mkdir()
    with EmbeddedServer() as server, cluster(workers, folder) as master:
        done = subprocess.run(
            [sys.executable, __file__, "--driver", master, server.url, str(rows), str(events)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return {
            "seconds": round(float(done.stdout.split()[-1]), 1),
            "task_seconds": task_seconds(events),
            "digest": digest(server.url),
        }


def main(rows: int) -> dict[str, Any]:
    """Run the measurement; returns the figures."""
    use_java()
    with tempfile.TemporaryDirectory(prefix="lisa-workers-") as folder:
        path = Path(folder, "rows.parquet")
        write_file(path, rows)
        one, two = (run(workers, path, Path(folder)) for workers in (1, 2))
    return {
        "rows": rows,
        "identical": float(one["digest"] == two["digest"]),
        "speedup": round(one["seconds"] / two["seconds"], 2),
        "one": one,
        "two": two,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--driver"]:
        print(driver(*sys.argv[2:]))
    else:
        print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 500_000)))
