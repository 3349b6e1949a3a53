"""The processes of a run: each can be started, killed, stopped, watched, or get a shifted clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tests.servers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LEAVES_WITHIN_S = 30.0


def leash() -> list[str]:
    """A command prefix that ends a process with this one, even if killed; empty without setpriv."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "KILL"] if found else []


def plain_environment(*path: str) -> dict[str, str]:
    """This process's environment without Lisa's settings; imports search `path` first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    return env | {
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
    }


class Incarnation:
    """One process of a role, with a number unique in the run."""

    def __init__(self, role: Role, number: int, popen: subprocess.Popen[bytes]) -> None:
        self.role = role
        self.number = number
        self.began = time.monotonic()
        self._popen = popen

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def tell_to_leave(self) -> None:
        """Send SIGTERM, also to a stopped process."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end, with SIGKILL after a timeout. Returns the exit code."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(LEAVES_WITHIN_S)
        self.kill()
        return -signal.SIGKILL


class Build(NamedTuple):
    """The directory of a Lisa build; None: this checkout."""

    path: Path | None = None


class Role:
    """A named role in the run, filled by one process at a time.

    command: the arguments of `python`.
    env: additional environment, given the number of the incarnation.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Callable[[int], Mapping[str, str]],
        numbers: Callable[[], int],
        directory: Path,
    ) -> None:
        self.name = name
        self.kind = name.partition("-")[0]
        self.build = Build()
        self.shift_s = 0
        self.now: Incarnation | None = None
        self.is_wanted = True
        self._command = command
        self._env = env
        self._numbers = numbers
        self._directory = directory

    @property
    def is_alive(self) -> bool:
        """Whether the role has a running process."""
        return self.now is not None and self.now.poll() is None

    def start(self) -> Incarnation:
        """Start a new process; its output is appended to the role's log."""
        number = self._numbers()
        path = [str(self.build.path)] if self.build.path else []
        env = plain_environment(*path) | {
            "TORTURE_PROCESS": str(number),
            "TORTURE_CLOCK_SHIFT_S": str(self.shift_s),
            **self._env(number),
        }
        with (self._directory / f"{self.name}.log").open("ab") as log:
            popen = subprocess.Popen(
                [*leash(), sys.executable, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self._directory,
                start_new_session=True,
            )
        self.now = Incarnation(self, number, popen)
        return self.now

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.is_wanted = False
        if self.now is not None and self.now.poll() is None:
            self.now.signal(signal.SIGCONT)
            self.now.kill()
