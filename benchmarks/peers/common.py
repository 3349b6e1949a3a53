"""Shared code of the peers' programs: the protocol, the messages and the ledger.

A program describes its library as a `Peer` and calls `main(peer)`; the README of this folder
specifies the protocol. This module uses only the standard library, because it runs in each peer's
environment, where Lisa is not installed.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

BODY_BYTES = 100
FLUSH_SECONDS = 0.02
NO_SUCH_COMMAND = 3  # exit code of `send-concurrent` without an asyncio API
START_SECONDS = 60.0
STOP_SECONDS = 10.0
RECORD = struct.Struct("<qq")


class Message(NamedTuple):
    """One message to send.

    due_ms: milliseconds since the epoch.
    body: 100 bytes of text; its first 13 digits are due_ms.
    """

    due_ms: int
    body: str

    @property
    def due(self) -> datetime:
        """The due time, aware, in UTC."""
        return datetime.fromtimestamp(self.due_ms / 1000, UTC)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One library and its best settings.

    packages: distributions whose versions are reported.
    processes: number of worker processes with the best drain rate on two cores.
    send: sends messages in the library's fastest way; returns the seconds taken, without
        connecting.
    send_single: like `send`, but one call per message, sequentially.
    send_concurrent: like `send_single`, from several asyncio tasks; None without an asyncio API.
    worker: runs worker number N (from 0); calls `ready` when it accepts jobs, returns after
        SIGTERM.
    programs: versions of programs other than Python packages, by name.
    """

    packages: tuple[str, ...]
    processes: int
    send: Callable[[Sequence[Message]], float]
    send_single: Callable[[Sequence[Message]], float]
    send_concurrent: Callable[[Sequence[Message], int], float] | None = None
    worker: Callable[[int], None]
    programs: Callable[[], dict[str, str]] = dict


def redis_url() -> str:
    """The URL of this run's server."""
    return os.environ["BENCH_REDIS_URL"]


def batches(messages: Sequence[Message], size: int) -> Iterator[Sequence[Message]]:
    """Split messages into batches, in order."""
    for start in range(0, len(messages), size):
        yield messages[start : start + size]


class LedgerWriter:
    """The messages that this process handled: 16-byte records of due time and handling time.

    Times are microseconds since the epoch. A thread writes every 20 ms, so that handlers only
    append to a list.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Start an empty ledger with a new file, as a forked worker must."""
        self._records: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._descriptor = -1

    def add(self, body: str) -> None:
        """Record that the message with this body is handled now."""
        if self._descriptor < 0:
            self._open()
        self._records.append(RECORD.pack(int(body[:13]) * 1000, time.time_ns() // 1000))

    def flush(self) -> None:
        """Write the records noted so far."""
        with self._writing:
            records = self._records
            # Records that handlers append meanwhile are written in the next round.
            data = b"".join([records.popleft() for _ in range(len(records))])
            if data:
                os.write(self._descriptor, data)

    def _open(self) -> None:
        with self._writing:
            if self._descriptor >= 0:
                return
            path = Path(os.environ["BENCH_LEDGER"]) / f"{os.getpid()}.ledger"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        threading.Thread(target=self._flush_always, daemon=True).start()

    def _flush_always(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()


_ledger = LedgerWriter()
os.register_at_fork(after_in_child=_ledger.renew)
atexit.register(_ledger.flush)


def handled(body: str) -> None:
    """Record a message in the ledger: the only work of the benchmark's handler."""
    _ledger.add(body)


def ready() -> None:
    """Report once that this worker process accepts jobs."""
    descriptor = os.environ.pop("BENCH_READY", None)
    if descriptor is not None:
        os.write(int(descriptor), b"ready\n")


def main(peer: Peer) -> None:
    """Run the command given on the command line."""
    options = _parser().parse_args()
    if options.command == "versions":
        print(json.dumps(_versions(peer)))
    elif options.command == "work":
        sys.exit(_work(peer.processes))
    elif options.command == "worker":
        peer.worker(options.number)
    else:
        _send(peer, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("versions")
    commands.add_parser("work")
    commands.add_parser("worker").add_argument("number", type=int)
    for name in ("send", "send-single", "send-concurrent", "send-paced"):
        command = commands.add_parser(name)
        command.add_argument("--count", type=int, required=True)
        if name == "send-paced":
            command.add_argument("--start-ms", type=int, required=True)
            command.add_argument("--rate", type=float, required=True)
        else:
            command.add_argument("--due-ms", type=int, required=True)
        if name == "send-concurrent":
            command.add_argument("--tasks", type=int, default=100)
    return parser


def _versions(peer: Peer) -> dict[str, str]:
    found = {name: version(name) for name in peer.packages}
    return found | peer.programs() | {"python": platform.python_version()}


def _send(peer: Peer, options: argparse.Namespace) -> None:
    messages = _messages(options)
    if options.command == "send-single":
        seconds = peer.send_single(messages)
    elif options.command != "send-concurrent":
        seconds = peer.send(messages)
    elif peer.send_concurrent is not None:
        seconds = peer.send_concurrent(messages, options.tasks)
    else:
        sys.exit(NO_SUCH_COMMAND)
    print(json.dumps({"sent": len(messages), "seconds": seconds}))


def _messages(options: argparse.Namespace) -> list[Message]:
    if options.command == "send-paced":
        due = [options.start_ms + int(i * 1000 / options.rate) for i in range(options.count)]
    else:
        due = [options.due_ms] * options.count
    return [Message(due_ms, f"{due_ms:013d}".ljust(BODY_BYTES, "x")) for due_ms in due]


def _work(processes: int) -> int:
    """Run worker processes until SIGTERM, or until one of them exits."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(processes):
            workers.append(_start_worker(number))  # noqa: PERF401  a later failure ends them all
        print("ready", flush=True)
        while not stop.wait(0.1):
            if any(worker.poll() is not None for worker in workers):
                print("a worker process exited", file=sys.stderr)
                return 1
    finally:
        _end(workers)
    return 0


def _start_worker(number: int) -> subprocess.Popen[bytes]:
    """Start one worker process and wait until it accepts jobs."""
    reading, writing = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, sys.argv[0], "worker", str(number)],
        env=os.environ | {"BENCH_READY": str(writing)},
        pass_fds=(writing,),
        stdout=sys.stderr,  # standard output belongs to the protocol
    )
    os.close(writing)
    timer = threading.Timer(START_SECONDS, worker.kill)
    timer.start()
    word = os.read(reading, 16)  # empty if the process exited before it was ready
    timer.cancel()
    os.close(reading)
    if word != b"ready\n":
        worker.kill()
        worker.wait()
        raise SystemExit(f"worker process {number} did not start")
    return worker


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
