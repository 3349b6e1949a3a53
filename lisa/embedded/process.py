"""A role as a process of its own, ended with its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

GRACE_SECONDS = 10.0


class RoleProcess:
    """`python -m MODULE ARGUMENT...`, for as long as its owner lives, however the owner ends.

    env: added to the owner's environment.
    log: where standard output and error go; None: where the owner's go.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._command: Sequence[str] = (sys.executable, "-m", module, *arguments)
        self._env = {**os.environ, **(env or {})}
        self._log = log
        self._leash: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it."""
        leash = [sys.executable, "-m", "lisa.embedded.leash", str(GRACE_SECONDS)]
        log = self._log.open("ab") if self._log else None
        try:
            # A session of its own: Ctrl-C in a terminal goes to the owner, who then ends it.
            self._leash = subprocess.Popen(
                [*leash, *self._command],
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
        """Process id of what holds the program, its only child; 0 while it is not started."""
        return self._leash.pid if self._leash else 0

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._leash.poll() if self._leash else None

    def last_words(self) -> str:
        """The last lines of its log; empty without one."""
        if self._log is None or not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])

    def wait(self) -> int:
        """Wait for it to end by itself; its exit code."""
        return self._leash.wait() if self._leash else 0

    def stop(self) -> None:
        """Ask it to end, kill it after its grace time, and wait. Again: nothing."""
        leash, self._leash = self._leash, None
        if leash is not None:
            assert leash.stdin is not None  # noqa: S101 - for the type checker: it is a PIPE
            leash.stdin.close()
            leash.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
