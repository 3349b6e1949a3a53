"""beanstalkd: a separate work queue server in C with delays in whole seconds.

`work` runs the server; a sending command without `work` runs its own server. The port is derived
from the port of the run's Redis server.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import greenstalk

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST = "127.0.0.1"
SERVER_SECONDS = 5.0


def send(messages: Sequence[Message]) -> float:
    """Send with one call per message, because the client has no bulk call.

    A delay is a whole number of seconds from the receipt by the server. To be due on time and not
    up to a second later, each message is sent a whole number of seconds before its due time.
    """
    with (
        nullcontext() if _answers() else _server(),
        greenstalk.Client((HOST, _port()), use="bench") as client,
    ):
        _wait_for_whole_second(messages[0].due_ms)
        started = time.perf_counter()
        waited = 0.0
        for message in messages:
            waited += _wait_for_turn(message.due_ms, messages[0].due_ms)
            delay = -((time.time_ns() - message.due_ms * 1_000_000) // 1_000_000_000)
            client.put(message.body, delay=max(int(delay), 0))
        return time.perf_counter() - started - waited


def _wait_for_whole_second(due_ms: int) -> None:
    time.sleep((due_ms / 1000 - time.time()) % 1.0)


def _wait_for_turn(due_ms: int, first_ms: int) -> float:
    """Wait until this message is as far ahead of its due time as the first one was."""
    if due_ms == first_ms:
        return 0.0
    seconds = (due_ms / 1000 - time.time()) % 1.0
    if seconds > 0.5:  # its second has just begun
        return 0.0
    started = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - started


def worker(number: int) -> None:
    """Run the server, or reserve, handle and delete one message at a time."""
    if number == 0:
        _serve()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with greenstalk.Client((HOST, _port()), watch="bench") as client:
        ready()
        while True:
            job = client.reserve()
            handled(job.body)
            client.delete(job)


def _serve() -> None:
    stop = threading.Event()
    with _server():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        ready()
        stop.wait()


@contextmanager
def _server() -> Iterator[None]:
    """Run beanstalkd in memory, without a log on disk."""
    server = subprocess.Popen(["beanstalkd", "-l", HOST, "-p", str(_port())])
    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while not _answers():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("beanstalkd did not start")
            time.sleep(0.01)
        yield
    finally:
        server.terminate()
        server.wait()


def _port() -> int:
    # Below the ports that embedded servers take and that systems lend to outgoing connections.
    return 10_000 + (urlsplit(redis_url()).port or 0) % 10_000


def _answers() -> bool:
    try:
        socket.create_connection((HOST, _port()), 1.0).close()
    except OSError:
        return False
    return True


def _programs() -> dict[str, str]:
    said = subprocess.check_output(["beanstalkd", "-v"], text=True)
    return {"beanstalkd": said.split()[-1]}


main(
    Peer(
        packages=("greenstalk",),
        processes=3,
        send=send,
        send_single=send,
        worker=worker,
        programs=_programs,
    )
)
