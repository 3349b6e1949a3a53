"""Builds the wheel and installs it."""

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests import programs
from tests.servers import ROOT


def without_checkout() -> dict[str, str]:
    """The environment of a process that does not see the checkout."""
    hidden = ("PYTHON", "PYSPARK", "LISA_")
    return {n: v for n, v in os.environ.items() if not n.startswith(hidden)}


def start(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the checkout on its path."""
    return programs.run(*command, check=False, cwd=cwd, env=without_checkout())


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of such a command, which must succeed."""
    return programs.run(*command, cwd=cwd, env=without_checkout()).stdout


def build(to: Path, kind: str = "wheel", project: Path = ROOT) -> Path:
    """Build a distribution that is the only one of its name in `to`."""
    before = set(to.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=project)
    (built,) = set(to.iterdir()) - before
    return built


def environment(folder: Path) -> Path:
    """The `bin` of a new environment without pip."""
    venv.create(folder / "venv", with_pip=False)
    return folder / "venv" / "bin"


def pip(binaries: Path, *arguments: str | Path) -> str:
    """Run pip for an environment."""
    own = (sys.executable, "-m", "pip", "--python", binaries / "python")
    return run(*own, *arguments, cwd=binaries)


def install(binaries: Path, *arguments: str | Path) -> None:
    """Install without compiling all modules: Python compiles those that a test imports."""
    pip(binaries, "install", "--quiet", "--no-compile", *arguments)
