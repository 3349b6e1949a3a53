"""Starts the mutants' runs and collects their results."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.mutants.mutant import Mutant, apply
from tests.servers import ROOT

CONTROL = "unpatched"
"""The name of the unpatched run: all tests must pass there, or their failures prove nothing."""


class Runner:
    """The process that runs mutants, for as long as the context lasts."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        every = sorted({test for mutant in mutants for test in mutant.tests})
        self._jobs: list[dict[str, Any]] = [{"name": CONTROL, "files": {}, "tests": every}]
        self._found: dict[str, dict[str, Any]] = {}
        for mutant in mutants:
            try:
                job = {"name": mutant.number, "files": apply(mutant), "tests": mutant.tests}
            except LookupError as error:
                self._found[mutant.number] = {"broken": str(error)}
            else:
                self._jobs.append(job)

    def __enter__(self) -> Self:
        self._scratch = tempfile.mkdtemp(prefix="lisa-mutants-")
        nursery = Path(__file__).with_name("nursery.py")
        self._process = subprocess.Popen(
            [sys.executable, nursery, ROOT, self._scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_clean(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        json.dump(self._jobs, self._process.stdin)
        self._process.stdin.close()
        return self

    def outcome(self, name: str) -> dict[str, Any]:
        """The results of a mutant's tests, or of the unpatched run; waits for them."""
        assert self._process.stdout is not None
        while name not in self._found:
            line = self._process.stdout.readline()
            assert line, f"the process that tries mutants out has ended before {name}"
            outcome = json.loads(line)
            self._found[outcome["name"]] = outcome
        return self._found[name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _clean() -> dict[str, str]:
    """The environment without the outer session's pytest settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LISA_", "PYTEST_", "PYTHON"))
    }
