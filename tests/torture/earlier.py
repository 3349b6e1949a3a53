"""The earlier build of Lisa with which a run begins."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.servers import ROOT

RELEASE = "569b0c0"
"""The commit of the last release, 0.1.0."""


def is_known(commit: str) -> bool:
    """Whether the repository, which may be a shallow clone or none, has a commit."""
    git = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(git, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def unpacked(build: str, out: Path) -> Path:
    """The directory from which Python imports a build.

    build: a directory, a wheel, or a commit, from which a wheel is built.
    out: a new directory for what is unpacked.
    """
    path = Path(build)
    if path.is_dir():
        return path.resolve()
    wheel = path if path.is_file() else _wheel_of(build, out.with_name(f"{out.name}-source"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out)
    return out


def _wheel_of(commit: str, source: Path) -> Path:
    source.mkdir()
    archive = source / "source.tar"
    git = ["git", "-C", str(ROOT), "archive", f"--output={archive.resolve()}", commit]
    subprocess.run(git, check=True)
    subprocess.run(["tar", "-xf", archive.name], cwd=source, check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    [wheel] = (source / "dist").glob("*.whl")
    return wheel
