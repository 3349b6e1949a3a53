"""Builds the wheels of both distributions and installs them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

from tests.servers import ROOT

CLIENT = ROOT / "packaging" / "client"


class Wheels(NamedTuple):
    """The paths of the two wheels."""

    client: Path
    full: Path


def client_parts() -> tuple[str, ...]:
    """Files and folders of the source tree that belong to the client."""
    parts: tuple[str, ...] = runpy.run_path(str(CLIENT / "hatch_build.py"))["PARTS"]
    return parts


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed without the checkout on its path."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "LISA_"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(project: Path, to: Path, kind: str = "wheel") -> Path:
    """Build one distribution of a project that is the only one of its name in `to`."""
    before = set(to.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=project)
    (built,) = set(to.iterdir()) - before
    return built


def build_both(to: Path) -> Wheels:
    """Build the wheels of the checkout."""
    return Wheels(client=build(CLIENT, to), full=build(ROOT, to))


def environment(folder: Path) -> Path:
    """The `bin` of a new environment without pip."""
    venv.create(folder / "venv", with_pip=False)
    return folder / "venv" / "bin"


def pip(binaries: Path, *arguments: str | Path) -> str:
    """Run pip for an environment."""
    own = (sys.executable, "-m", "pip", "--python", binaries / "python")
    return run(*own, *arguments, cwd=binaries)
