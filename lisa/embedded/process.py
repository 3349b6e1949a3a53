"""Run a role in a child process that ends with its owner."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Self

from lisa.core.daemon.processes import python

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GRACE_SECONDS = 10.0


class RoleProcess:
    """A child process `python -m MODULE ARGUMENT...` that ends with its owner, even after kill -9.

    env: variables added to the owner's environment.
    log: file that receives standard output and error; None inherits the owner's streams.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command: Sequence[str] = python(module, *arguments)
        self._env = {**os.environ, **(env or {})}
        self._log = log
        self._watch: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process."""
        watch = python("lisa.embedded.parent_watch", str(GRACE_SECONDS))
        log = self._log.open("ab") if self._log else None
        try:
            # In its own session, the child does not receive Ctrl-C; the owner does, and ends it.
            self._watch = subprocess.Popen(
                [*watch, *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        finally:
            if log:
                log.close()
        return self

    @property
    def pid(self) -> int:
        """Process id of the parent watch, whose only child is the program; 0 before `start`."""
        return self._watch.pid if self._watch else 0

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._watch.poll() if self._watch else None

    def log_tail(self) -> str:
        """The last five lines of the log; empty without a log file."""
        if self._log is None or not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def wait(self) -> int:
        """Wait until the process ends and return its exit code."""
        return self._watch.wait() if self._watch else 0

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after 10 s, and wait. A second call does nothing."""
        watch, self._watch = self._watch, None
        if watch is not None:
            assert watch.stdin is not None  # noqa: S101 - for the type checker: it is a PIPE
            watch.stdin.close()
            watch.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
