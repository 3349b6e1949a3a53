"""Runs programs to their end, and what some of them run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.servers import ROOT


def run(
    *command: str | Path, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command, which must succeed unless `check` is false; its output is text."""
    usual: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(command, check=False, **usual | options)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same with Python."""
    return run(sys.executable, *arguments, **options)


NEVER_IMPORTED = """
import time
print("importing")
while True:
    time.sleep(0.01)
"""
"""A module to stop a program with. One long sleep would not see a signal that arrives right before
it."""
