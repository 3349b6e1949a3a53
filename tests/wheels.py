"""Builds the wheels of both distributions and installs them."""

import os
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests import programs
from tests.servers import ROOT

CLIENT = ROOT / "packaging" / "client"
COPY = (ROOT / "packaging" / "lisa-delay-queue.pth").read_text("utf-8").strip()
"""The folder with the copy of the client's files in the full wheel."""


class Wheels(NamedTuple):
    """The paths of the two wheels."""

    client: Path
    full: Path


def client_parts() -> tuple[str, ...]:
    """Files and folders of the source tree that belong to the client."""
    parts: tuple[str, ...] = runpy.run_path(str(CLIENT / "hatch_build.py"))["PARTS"]
    return parts


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


def build(project: Path, to: Path, kind: str = "wheel") -> Path:
    """Build one distribution of a project that is the only one of its name in `to`."""
    before = set(to.iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=project)
    (built,) = set(to.iterdir()) - before
    return built


def build_both(to: Path) -> Wheels:
    """Build the wheels of the checkout."""
    return Wheels(client=build(CLIENT, to), full=build(ROOT, to))


def merged(wheels: Wheels, version: str, to: Path) -> Path:
    """A wheel as earlier versions had it: it owns the files of both distributions."""
    files = {}
    information = f"lisa_delay_queue-{version}.dist-info"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                folder, _, rest = name.partition("/")
                if folder == "lisa":
                    files[name] = archive.read(name)
                elif wheel == wheels.full and folder.endswith(".dist-info"):
                    files[f"{information}/{rest}"] = archive.read(name)
    metadata = files[f"{information}/METADATA"]
    metadata = re.sub(rb"(?m)^Version: .*", f"Version: {version}".encode(), metadata)
    files[f"{information}/METADATA"] = re.sub(rb"(?m)^Requires-Dist: lisa-.*\n", b"", metadata)
    files[f"{information}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    built = to / f"lisa_delay_queue-{version}-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
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
