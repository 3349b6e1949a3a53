"""The data that a killed server loses, by its persistence setting, and since when at the latest.

A kill alone loses little: written data survives its process. So under `everysec` a kill simulates a
power cut: the last second's additions are cut off the append-only file, which is what the setting
allows to be lost.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import redis

PUT_OFF_S = 2.0  # how long the server may postpone a write during an fsync
SAVE_EVERY_S = 5.0


class Tail:
    """Under `always`: no confirmed write is ever lost."""

    def begin(self) -> None:
        """All topics are declared: that must not be lost."""

    def step(self) -> None:
        """Call several times a second while the server runs. Raises redis.RedisError."""

    def before_kill(self) -> int | None:
        """Since when (us) a kill right now may lose confirmed writes; None: no loss."""
        return None

    def after_kill(self) -> None:
        """Make the loss as large as the setting allows."""


class PowerCut(Tail):
    """Under `everysec`."""

    def __init__(self, directory: Path, loses_s: float) -> None:
        self._directory = directory / "appendonlydir"
        self._loses_s = loses_s
        self._sizes: deque[tuple[float, Path, int]] = deque()

    def step(self) -> None:
        now = time.monotonic()
        with suppress(FileNotFoundError):  # the file is being rewritten
            if newest := self._newest():
                self._sizes.append((now, newest, newest.stat().st_size))
        while len(self._sizes) > 1 and self._sizes[1][0] < now - self._loses_s:
            self._sizes.popleft()

    def before_kill(self) -> int | None:
        most_s = self._loses_s + PUT_OFF_S
        while self._sizes and self._sizes[0][0] < time.monotonic() - most_s:
            self._sizes.popleft()  # not checked since for lack of time: that would be too much
        return int((time.time() - most_s) * 1e6)

    def after_kill(self) -> None:
        if self._sizes:
            _, file, size = self._sizes[0]
            if self._newest() == file and file.stat().st_size > size:
                with file.open("r+b") as log:
                    log.truncate(size)
            self._sizes.clear()

    def _newest(self) -> Path | None:
        files = self._directory.glob("*.incr.aof")
        return max(files, key=lambda file: file.stat().st_mtime, default=None)


class Snapshots(Tail):
    """Under `snapshot`: one is started every few seconds."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._began: int | None = None
        self._held = int(time.time() * 1e6)
        self._next = math.inf

    def begin(self) -> None:
        began = int(time.time() * 1e6)
        self._client.save()
        self._held, self._next = began, 0.0

    def step(self) -> None:
        info = self._client.info("persistence")
        if self._began is not None and not info["rdb_bgsave_in_progress"]:
            if info["rdb_last_bgsave_status"] == "ok" and info["rdb_last_save_time"]:
                self._held = self._began
            self._began = None
        if self._began is None and time.monotonic() >= self._next:
            began = int(time.time() * 1e6)
            self._next = time.monotonic() + SAVE_EVERY_S
            self._client.bgsave()
            self._began = began

    def before_kill(self) -> int | None:
        self.step()
        return self._held

    def after_kill(self) -> None:
        self._began = None
        self._next = 0.0
