"""Keep one server process, and end it with whoever asked for it.

This file is run as a script, in an interpreter that imports nothing else of Lisa's:

    supervisor.py DIRECTORY keep|remove PROGRAM ARGUMENT...

It reads one command a line from standard input (start, stop, kill, poll) and answers each with
one line on standard output. Standard input is the leash: when it closes, because the owner closed
it or because the kernel did after a kill -9, the server is ended and a directory that is not to
be kept is removed. That one rule serves every system and every way an owner can die.
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

STOP_SECONDS = 30.0  # what a server may take to write its data before it is killed
LOCK_SECONDS = 5.0  # a predecessor in the same directory may be stopping just now
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill the server if this supervisor itself is killed with -9.

    It runs between fork and exec, which is safe here: the supervisor has a single thread, and
    the signal follows the thread that forked.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Supervisor:
    """One server, started and ended by commands."""

    def __init__(self, directory: Path, argv: list[str]) -> None:
        self._directory = directory
        self._argv = argv
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the server in place of an earlier one; its process id."""
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
        """End the server after it has written its data."""
        if self._server is not None and self._server.poll() is None:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(STOP_SECONDS)
        return self.kill()

    def kill(self) -> str:
        """End the server at once."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        return "ended"

    def poll(self) -> str:
        """Tell whether the server runs."""
        return "runs" if self._server and self._server.poll() is None else "ended"


def lock(directory: Path) -> int:
    """Take the directory for this supervisor; two servers would write over each other's data."""
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
    """End as if the owner had let go."""
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
