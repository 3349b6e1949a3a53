"""Run one server process and end it when its owner ends.

This file runs as a script, in an interpreter that imports no other Lisa module:

    supervisor.py DIRECTORY keep|remove PROGRAM ARGUMENT...

It reads one command per line from standard input (start, stop, kill, poll) and answers each with
one line on standard output. Standard input closes when the owner closes it or dies, even by
kill -9, on every operating system. The supervisor then ends the server and, unless the directory
is to be kept, removes it.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

STOP_SECONDS = 30.0  # how long a server may take to save its data before it is killed
LOCK_SECONDS = 5.0  # how long to wait for a stopping server that still uses the directory
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have Linux kill the server if this supervisor is killed with SIGKILL.

    Runs between fork and exec, which is safe because the supervisor has a single thread. Linux
    sends the signal when the thread that forked ends.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """One server process, controlled by commands. Each method returns the answer to its command."""

    def __init__(self, directory: Path, argv: list[str]) -> None:
        self._directory = directory
        self._argv = argv
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Kill any earlier server, start a new one and return its process id."""
        self.kill()
        with (self._directory / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        return str(self._server.pid)

    def stop(self) -> str:
        """Stop the server, with up to 30 s to save its data."""
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(STOP_SECONDS)
        return self.kill()

    def kill(self) -> str:
        """Kill the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        return "ended"

    def poll(self) -> str:
        """Whether the server runs: "runs" or "ended"."""
        return "runs" if self._server and self._server.poll() is None else "ended"


def lock(directory: Path) -> int:
    """Lock the directory, because two servers would overwrite each other's data.

    Raises BlockingIOError if another supervisor holds the lock for 5 s.
    """
    descriptor = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def leave(_signal: int, _frame: FrameType | None) -> None:
    """Signal handler: end as if the owner had closed standard input."""
    raise SystemExit(0)


def main(directory: Path, keep: bool, argv: list[str]) -> None:  # noqa: FBT001 - one caller, below
    """Serve commands until standard input closes."""
    signal.signal(signal.SIGTERM, leave)
    supervisor = Supervisor(directory, argv)
    commands = {
        "start": supervisor.start,
        "stop": supervisor.stop,
        "kill": supervisor.kill,
        "poll": supervisor.poll,
    }
    try:
        lock(directory)
        for line in sys.stdin:
            try:
                answer = commands[line.strip()]()
            except OSError as error:
                answer = f"error: {error}"
            print(answer, flush=True)  # noqa: T201 - the answer of the protocol
    except BlockingIOError:
        print(f"error: another server uses {directory}", flush=True)  # noqa: T201
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if keep:
            supervisor.stop()
        else:
            supervisor.kill()
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "keep", sys.argv[3:])
