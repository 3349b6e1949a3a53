"""`reStore` and `reStoreJob`: `lisa pipeline restore` from the gateway's archive, as a process.

It is Spark's work and takes seconds at least, in a process of its own: one at a time. Its exact
lists go with it; who wants them runs the command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from lisa.core.errors import ConfigError
from lisa.gateway.hub import Hub
from lisa.gateway.problems import Problem
from lisa.gateway.waiting import Crowded

__all__ = ["Restorer", "command_of"]

WITHIN_S = 3600.0
SHOWN = 500


class _Report(msgspec.Struct):
    counts: dict[str, int]


def command_of(archive: Path, report: Path, options: Sequence[str]) -> list[str]:
    """The command line; the server's address, which may hold a password, is not in it."""
    return [
        sys.executable, "-m", "lisa.cli.main", "--json", "pipeline", "restore",
        "--archive", str(archive), "--report", str(report), *options,
    ]  # fmt: skip


class Restorer:
    """Runs restores, one at a time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = asyncio.Lock()

    async def restore(self, options: Sequence[str]) -> dict[str, int]:
        """Run one; how many messages met which end. Raises ConfigError, Crowded, Problem."""
        archive = self._hub.settings.gateway_server.archive
        if archive is None:
            raise ConfigError(
                "no archive is configured to restore from: start the gateway with --archive DIR, "
                "or set gateway-server.archive"
            )
        if self._lock.locked():
            raise Crowded("a restore is running already")
        async with self._lock:
            with tempfile.TemporaryDirectory(prefix="lisa-restore-") as directory:
                command = command_of(archive.absolute(), Path(directory) / "report", options)
                return await self._run(command)

    async def _run(self, command: Sequence[str]) -> dict[str, int]:
        process = await asyncio.create_subprocess_exec(
            *command, env=self._environment(), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Java is its child, and ends with it
        )  # fmt: skip
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise _failed(f"it took more than {WITHIN_S:g} s and was ended") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        try:
            return msgspec.json.decode(out, type=_Report).counts
        except msgspec.DecodeError:
            lines = err.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise _failed(lines[-1][:SHOWN]) from None

    def _environment(self) -> dict[str, str]:
        from lisa.pipeline.source.options import as_url

        clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
        address = self._hub.address
        return {**clean, "LISA_REDIS_URL": as_url(address),
                "LISA_PREFIX": self._hub.store.keys.prefix}  # fmt: skip


def _failed(why: str) -> Problem:
    return Problem(409, "restore-failed", f"the restore failed: {why}")
