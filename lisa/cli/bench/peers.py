"""Other queues: where their programs lie, the environments they run in, how they are called.

A peer is a folder with a program, `peer.py` or `peer.mjs`, and its pinned dependencies,
`requirements.txt` or `package.json`; `peer.toml` may say more. The protocol stands in
`benchmarks/peers/README.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lisa.cli.bench.fault import Fault

__all__ = ["Installed", "Peer", "find", "install"]

INSTALL_S = 600.0
STAMP = "installed"
NO_SUCH_COMMAND = 3
PROGRAMS = {"python": "peer.py", "node": "peer.mjs"}


@dataclass(frozen=True, slots=True)
class Peer:
    """What a peer's folder says.

    kind: python or node. needs: programs on PATH. server: redis, or none if it has its own.
    skip: measures that make no sense for it, and why.
    """

    name: str
    folder: Path
    kind: str
    needs: tuple[str, ...] = ()
    server: str = "redis"
    skip: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Peer:
        """The peer in a folder."""
        told: dict[str, Any] = {}
        if (path := folder / "peer.toml").exists():
            told = tomllib.loads(path.read_text(encoding="utf-8"))
        kind = told.get("kind", "node" if (folder / PROGRAMS["node"]).exists() else "python")
        return cls(
            folder.name, folder.resolve(), kind, tuple(told.get("needs", ())),
            told.get("server", "redis"), dict(told.get("skip", {})),
        )  # fmt: skip

    @property
    def pinned(self) -> Path:
        """What it depends on."""
        name = "requirements.txt" if self.kind == "python" else "package.json"
        return self.folder / name


def find(folder: Path) -> list[Peer]:
    """All peers of a folder, by name."""
    programs = [path for name in PROGRAMS.values() for path in folder.glob(f"*/{name}")]
    return [Peer.read(one) for one in sorted({path.parent for path in programs})]


@dataclass(frozen=True, slots=True)
class Installed:
    """A peer that can be called."""

    peer: Peer
    environment: Path

    def command(self, *arguments: str) -> Sequence[str]:
        """The command line of one of its commands."""
        if self.peer.kind == "python":
            program = str(self.environment / "bin" / "python")
        else:
            program = shutil.which("node") or "node"
        return (program, PROGRAMS[self.peer.kind], *arguments)

    def environ(self, **given: str) -> dict[str, str]:
        """The environment of its processes."""
        return {
            **os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
            "BENCH_ENVIRONMENT": str(self.environment), **given,
        }  # fmt: skip

    def call(self, *arguments: str, timeout_s: float, **environ: str) -> dict[str, Any]:
        """Run a command to its end; the JSON object that it prints, empty if it has none such.

        Raises:
            Fault: it failed or took too long; the text ends with its last words.
        """
        code, said, complaint = _run(
            self.command(*arguments), self.peer.folder, timeout_s, self.environ(**environ)
        )
        if code == NO_SUCH_COMMAND:
            return {}
        if code != 0:
            raise Fault(f"{arguments[0]} ended with {code}: {_last_line(complaint)}")
        try:
            answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise Fault(f"{arguments[0]} printed no JSON: {_last_line(said)}") from None
        return answer


def install(peer: Peer, build: Path) -> Installed:
    """Make the peer's environment, or keep the one that is there for the same requirements.

    Raises:
        Fault: it cannot be installed here; the text says why.
    """
    for program in (*peer.needs, *(("node", "npm") if peer.kind == "node" else ())):
        if shutil.which(program) is None:
            raise Fault(f"{program} is not on PATH")
    environment = (build / peer.name).resolve()
    wanted = _fingerprint(peer)
    stamp = environment / STAMP
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(environment, ignore_errors=True)
        environment.mkdir(parents=True)
        (_install_python if peer.kind == "python" else _install_node)(peer, environment)
        stamp.write_text(wanted, encoding="utf-8")
    return Installed(peer, environment)


def _fingerprint(peer: Peer) -> str:
    files = [peer.pinned, peer.folder / "package-lock.json"]
    content = b"".join(path.read_bytes() for path in files if path.exists())
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def _install_python(peer: Peer, environment: Path) -> None:
    # This interpreter's pip installs into the other: quicker, and Debian has no ensurepip.
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    _must_run((*pip, "--requirement", str(peer.pinned)), peer.folder)


def _install_node(peer: Peer, environment: Path) -> None:
    for path in peer.folder.glob("package*.json"):
        shutil.copy(path, environment)
    # Not `npm ci`: it refuses a lock file that was made on another system, for the packages that
    # only this system takes. `install` keeps to what is locked, too.
    _must_run(("npm", "install", "--no-audit", "--no-fund"), environment)


def _must_run(command: Sequence[str], folder: Path) -> None:
    code, _, complaint = _run(command, folder, INSTALL_S, dict(os.environ))
    if code != 0:
        errors = [line for line in complaint.splitlines() if "error" in line.lower()]
        telling = next((line for line in errors if len(line.split()) > 5), _last_line(complaint))
        raise Fault(f"it cannot be installed: {telling[:300]}")


def _run(
    command: Sequence[str], folder: Path, timeout_s: float, environ: Mapping[str, str]
) -> tuple[int, str, str]:
    """Exit code, output and complaints of a process in a group of its own."""
    with subprocess.Popen(
        command, cwd=folder, env=environ, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            said, complaint = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Fault(f"{' '.join(command[1:3])} took longer than {timeout_s:.0f} s") from None
        finally:
            end_group(process.pid)
    return process.returncode, said, complaint


def end_group(leader: int) -> None:
    """Kill what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):  # the latter: macOS, on zombies
        os.killpg(leader, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
