"""`reStore` and `reStoreJob`: run `lisa pipeline restore` on the gateway's archive.

The restore is a Spark job and takes at least several seconds, so it runs as a separate process, one
at a time. Its detailed report is discarded; to keep it, run the command directly.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from lisa.core.daemon.processes import python, writable_folder
from lisa.core.model.errors import ConfigError
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.shares import Crowded

WITHIN_S = 3600.0
SHOWN = 500


class _Report(msgspec.Struct):
    counts: dict[str, int]


def command_of(archive: str, report: Path, options: Sequence[str]) -> list[str]:
    """The command line, without the server's address, which may contain a password."""
    return python(
        "lisa.cli.main",
        "--json",
        "pipeline",
        "restore",
        "--archive",
        os.path.abspath(archive),  # noqa: PTH100  no file is read
        "--report",
        str(report),
        *options,
    )


class Restorer:
    """Runs restores, one at a time."""

    def __init__(self, hub: GatewayContext) -> None:
        self._hub = hub
        self._lock = asyncio.Lock()

    async def restore(self, options: Sequence[str]) -> dict[str, int]:
        """Run a restore; returns counts by outcome.

        Raises ConfigError, Crowded or ErrorResponse.
        """
        archive = self._hub.settings.gateway_server.archive
        if archive is None:
            raise ConfigError(
                "no archive is configured: start the gateway with --archive DIR, "
                "or set gateway-server.archive"
            )
        if "://" in archive:
            raise ConfigError(f"to restore from {archive}, run lisa pipeline restore")
        if self._lock.locked():
            raise Crowded("a restore is already running")
        async with self._lock:
            with tempfile.TemporaryDirectory(
                prefix="lisa-restore-", dir=writable_folder()
            ) as directory:
                command = command_of(archive, Path(directory) / "report", options)
                return await self._run(command)

    async def _run(self, command: Sequence[str]) -> dict[str, int]:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that the Java child process can be killed too
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise _failed(f"it took more than {WITHIN_S:g} s and was killed") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        try:
            return msgspec.json.decode(out, type=_Report).counts
        except msgspec.DecodeError:
            lines = err.decode("utf-8", "replace").strip().splitlines() or ["no error output"]
            raise _failed(lines[-1][:SHOWN]) from None

    def _environment(self) -> dict[str, str]:
        from lisa.pipeline.source.options import as_url

        clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
        address = self._hub.address
        return {
            **clean,
            "LISA_REDIS_URL": as_url(address),
            "LISA_PREFIX": self._hub.store.keys.prefix,
        }


def _failed(reason: str) -> ErrorResponse:
    return ErrorResponse(409, "restore-failed", f"the restore failed: {reason}")
