"""Measurements of the gateway: `python -m benchmarks.gateway [--quick] [--out DIR]`.

Runs one gateway process, an embedded server and a manager on this machine. `sends`: the rate of
POSTs on 64 connections, relative to the same web server without a queue and to the gateway's CPU
time. `polls`: the lateness of messages at clients, with a thousand long polls on ten topics. Exit
code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import uvloop

from benchmarks.gateway.client import Caller, connect, post
from benchmarks.table import Figures, Row, show, write
from lisa import Manager, Producer
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port

HERE = Path(__file__).parent
CONNECTIONS = 64
POLLS = 1_000
TOPICS = 10
PER_SECOND = 200

ROWS = (
    Row("sends", "accepted, /s of the gateway's processor time", lambda f: f["per_core_second"]),
    Row("sends", "accepted, /s, load and server on the same cores", lambda f: f["per_second"]),
    Row(
        "sends",
        "the same / a bare web server",
        lambda f: f["per_second"] / f["bare"],
        at_least=0.25,
    ),
    Row("polls", "held at a time", lambda f: f["held"], at_least=POLLS),
    Row("polls", "due to the client's hands, p50, ms", lambda f: f["p50_ms"]),
    Row("polls", "due to the client's hands, p99, ms", lambda f: f["p99_ms"], at_most=20),
    Row("polls", "handed out before they were due", lambda f: f["early"], at_most=0),
    Row("polls", "resident memory of the gateway, MiB", lambda f: f["memory_mib"]),
)


def processor_seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """The resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextmanager
def process(port: int, *command: str) -> Iterator[int]:
    """Run a web server during a measurement; yields its process id."""
    running = subprocess.Popen([sys.executable, *command])
    try:
        while True:
            time.sleep(0.05)
            try:
                asyncio.run(_touch(port))
                break
            except OSError:
                if running.poll() is not None:
                    raise SystemExit(f"{command[-1]} did not start") from None
        yield running.pid
    finally:
        running.terminate()
        running.wait()


async def _touch(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


async def many_sends(url: str, seconds: float) -> float:
    """Send on all connections without pauses; returns accepted sends per second."""
    request = post(
        url, "/v1/topics/sends/messages", b'{"body": {"order": 42}, "delay_ms": 3600000}'
    )
    accepted, ends = 0, time.monotonic() + seconds
    done = asyncio.Event()
    running = CONNECTIONS

    def answered(caller: Caller, status: int, _body: bytes) -> None:
        nonlocal accepted, running
        if status != 201:
            raise SystemExit(f"a send was answered {status}")
        accepted += 1
        if time.monotonic() < ends:
            caller.send(request)
            return
        running -= 1
        if not running:
            done.set()

    callers = [await connect(url, answered) for _ in range(CONNECTIONS)]
    begun = time.monotonic()
    for caller in callers:
        caller.send(request)
    await done.wait()
    taken = time.monotonic() - begun
    for caller in callers:
        caller.close()
    return accepted / taken


def sends(url: str, pid: int, seconds: float) -> Figures:
    """Measure sends to the gateway, and the same load on a bare web server."""
    uvloop.run(many_sends(url, seconds / 4))
    before = processor_seconds(pid)
    per_second = uvloop.run(many_sends(url, seconds))
    used = processor_seconds(pid) - before
    port = free_port()
    with process(port, str(HERE / "bare.py"), str(port)):
        bare_url = f"http://127.0.0.1:{port}"
        uvloop.run(many_sends(bare_url, seconds / 4))
        bare = uvloop.run(many_sends(bare_url, seconds))
    return {
        "connections": CONNECTIONS,
        "seconds": seconds,
        "per_second": round(per_second),
        "per_core_second": round(per_second * seconds / used),
        "bare": round(bare),
    }


async def held_polls(url: str, redis_url: str, seconds: float) -> Figures:
    """Measure the lateness of messages at polling clients, in ms."""
    lateness: list[float] = []
    body = json.dumps({"wait_ms": 60_000, "group": "lisa"}).encode()
    requests = [post(url, f"/v1/topics/polls-{i}/pull", body) for i in range(TOPICS)]
    topic_of: dict[Caller, int] = {}
    total, done = round(seconds * PER_SECOND), asyncio.Event()

    def answered(caller: Caller, status: int, content: bytes) -> None:
        now_ms = time.time_ns() / 1e6
        if status != 200:
            raise SystemExit(f"a pull was answered {status}: {content!r}")
        found = json.loads(content)["deliveries"]
        lateness.extend(now_ms - delivery["due_ms"] for delivery in found)
        if len(lateness) >= total:
            done.set()
        caller.send(requests[topic_of[caller]])

    for number in range(POLLS):
        caller = await connect(url, answered)
        topic_of[caller] = number % TOPICS
        caller.send(requests[number % TOPICS])
    await asyncio.sleep(1.0)
    await asyncio.to_thread(_schedule, redis_url, total)
    await asyncio.wait_for(done.wait(), seconds + 30)
    for caller in topic_of:
        caller.close()
    ordered = sorted(lateness)
    return {
        "held": POLLS,
        "topics": TOPICS,
        "messages": total,
        "arrived": len(ordered),
        "p50_ms": round(ordered[len(ordered) // 2], 2),
        "p99_ms": round(ordered[len(ordered) * 99 // 100], 2),
        "max_ms": round(ordered[-1], 2),
        "early": sum(1 for one in ordered if one < 0),
    }


def _schedule(redis_url: str, total: int) -> None:
    """Send messages that fall due at a constant rate, starting in two seconds."""
    with Producer(redis_url) as producer:
        for number in range(total):
            producer.send(
                f"polls-{number % TOPICS}",
                number,
                delay=timedelta(seconds=2 + number / PER_SECOND),
            )


def main() -> int:
    """Run all measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    seconds = 3.0 if asked.quick else 15.0
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        topics = {f"polls-{i}": {"group": "lisa"} for i in range(TOPICS)}
        stack.enter_context(Manager(server.url, topics=topics))
        gateway = ("-m", "lisa.cli.gateway", "--redis", server.url, "--port", str(port))
        pid = stack.enter_context(process(port, *gateway, "--log-level", "warning"))
        figures = {"polls": uvloop.run(held_polls(url, server.url, seconds))}
        figures["polls"]["memory_mib"] = round(resident_mib(pid))
        figures["sends"] = sends(url, pid, seconds)
    met = show(ROWS, figures)
    if asked.out:
        head = "# The gateway, measured\n\nBy `make bench-gateway`: one process, its load, the"
        write(
            asked.out,
            "gateway",
            f"{head} server and a manager on the same cores.",
            ROWS,
            figures,
        )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
