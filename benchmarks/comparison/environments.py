"""Other queues ("peers"): finds their programs, installs them and runs their commands.

A peer is a folder with a program, `peer.py` or `peer.mjs`, its pinned dependencies,
`requirements.txt` or `package.json`, and optionally `peer.toml`. The README of `benchmarks/peers`
specifies the protocol.
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

from benchmarks.bench.results import Fault

INSTALL_S = 600.0
STAMP = "installed"
NO_SUCH_COMMAND = 3
PROGRAMS = {"python": "peer.py", "node": "peer.mjs"}


@dataclass(frozen=True, slots=True)
class Peer:
    """The description of a peer, read from its folder.

    kind: `python` or `node`.
    needs: programs that must be on PATH.
    server: `redis`, or `none` if the peer has its own server.
    limits: whether its program can limit the rate.
    skip: reasons, by measure, why a measure does not apply.
    """

    name: str
    folder: Path
    kind: str
    needs: tuple[str, ...] = ()
    server: str = "redis"
    limits: bool = False
    skip: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Peer:
        """Read the peer in a folder."""
        settings: dict[str, Any] = {}
        if (path := folder / "peer.toml").exists():
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        kind = settings.get("kind", "node" if (folder / PROGRAMS["node"]).exists() else "python")
        return cls(
            folder.name,
            folder.resolve(),
            kind,
            tuple(settings.get("needs", ())),
            settings.get("server", "redis"),
            settings.get("limits", False),
            dict(settings.get("skip", {})),
        )

    @property
    def pinned(self) -> Path:
        """The file of its pinned dependencies."""
        name = "requirements.txt" if self.kind == "python" else "package.json"
        return self.folder / name


def find(folder: Path) -> list[Peer]:
    """All peers in a folder, sorted by name."""
    programs = [path for name in PROGRAMS.values() for path in folder.glob(f"*/{name}")]
    return [Peer.read(one) for one in sorted({path.parent for path in programs})]


@dataclass(frozen=True, slots=True)
class Installed:
    """A peer with its environment, ready to run.

    limit: how many messages its workers may start per second; 0 for no limit.
    """

    peer: Peer
    environment: Path
    limit: int = 0

    def command(self, *arguments: str) -> Sequence[str]:
        """The command line of a peer's command."""
        if self.peer.kind == "python":
            program = str(self.environment / "bin" / "python")
        else:
            program = shutil.which("node") or "node"
        return (program, PROGRAMS[self.peer.kind], *arguments)

    def environ(self, **given: str) -> dict[str, str]:
        """The environment variables of the peer's processes."""
        return {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "BENCH_ENVIRONMENT": str(self.environment),
            "BENCH_LIMIT": str(self.limit),
            **given,
        }

    def call(self, *arguments: str, timeout_s: float, **environ: str) -> dict[str, Any]:
        """Run a command; returns the JSON object in its last line, {} for an unknown command.

        Raises:
            Fault: the command failed or took too long; the text ends with its last line.
        """
        code, output, errors = _run(
            self.command(*arguments), self.peer.folder, timeout_s, self.environ(**environ)
        )
        if code == NO_SUCH_COMMAND:
            return {}
        if code != 0:
            raise Fault(f"{arguments[0]} exited with {code}: {_last_line(errors)}")
        try:
            answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise Fault(f"{arguments[0]} printed no JSON: {_last_line(output)}") from None
        return answer


def install(peer: Peer, build: Path) -> Installed:
    """Create the peer's environment, or reuse one with the same requirements.

    Raises:
        Fault: the peer cannot be installed; the text says why.
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
    # Use this interpreter's pip: faster, and Debian has no ensurepip.
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    _must_run((*pip, "--requirement", str(peer.pinned)), peer.folder)


def _install_node(peer: Peer, environment: Path) -> None:
    for path in peer.folder.glob("package*.json"):
        shutil.copy(path, environment)
    # Not `npm ci`, which rejects a lock file from another system because of platform-specific
    # packages. `install` respects the lock file, too.
    _must_run(("npm", "install", "--no-audit", "--no-fund"), environment)


def _must_run(command: Sequence[str], folder: Path) -> None:
    code, _, errors = _run(command, folder, INSTALL_S, dict(os.environ))
    if code != 0:
        lines = [line for line in errors.splitlines() if "error" in line.lower()]
        reason = next((line for line in lines if len(line.split()) > 5), _last_line(errors))
        raise Fault(f"installation failed: {reason[:300]}")


def _run(
    command: Sequence[str], folder: Path, timeout_s: float, environ: Mapping[str, str]
) -> tuple[int, str, str]:
    """Run a process in a new process group; returns exit code, stdout and stderr."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        text=True,
        errors="replace",
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Fault(f"{' '.join(command[1:3])} took longer than {timeout_s:.0f} s") from None
        finally:
            end_group(process.pid)
    return process.returncode, output, errors


def end_group(leader: int) -> None:
    """Kill the remaining processes of a group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for zombies
        os.killpg(leader, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
