"""Commits versions of an archive in Parquet.

A batch is written to a staging directory, its files are moved to the table's directory, and the
next version of the manifest commits them. If the process is killed before the commit, the archive
is unchanged: a note written before the first move lists the files to delete. If it is killed after
the commit, the batch is recognized by its number and by the last event of each journal, and is not
written again.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.lease import Lease
from lisa.pipeline.archive.manifest import HIDDEN, Manifest, base_of, load, publish, sweep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGING = f"{HIDDEN}/staging"
MOVING = f"{HIDDEN}/moving.json"
LIVE = f"{HIDDEN}/live"
SWEEP_EVERY = 50
COMPRESSION = "zstd"


class Commits:
    """The current version of an archive, and the steps that lead to the next one.

    Holds the directory's lease until it is closed.

    Raises ConfigError if another process writes to the directory.
    """

    def __init__(self, folder: Folder, keep_ms: int) -> None:
        self._folder = folder
        self._keep_ms = keep_ms
        self._removed: set[str] = set()
        self._lease = Lease(folder)
        self._lease.take()
        try:
            self.manifest = load(folder) or Manifest()
            self._base = base_of(folder, self.manifest.base)
            self._clear()
        except BaseException:
            self._lease.release()
            raise

    @property
    def token(self) -> str:
        """Part of staging paths: tasks of a killed process may still write to its own path."""
        return self._lease.token

    def close(self) -> None:
        """Release the lease, so that another process can write."""
        self._lease.release()

    def stage(self, rows: DataFrame, table: str) -> list[tuple[str, str, int]]:
        """Write rows by day and topic; returns each file's path, final path and size in bytes."""
        folder = f"{STAGING}/{self.token}/{table}"
        self._folder.delete(folder)
        writer = rows.write.option("compression", COMPRESSION).partitionBy("day", "topic")
        writer.parquet(self._folder.url(folder))
        found = []
        for number, one in enumerate(self._folder.files(folder)):
            partition = one.path.removeprefix(f"{folder}/").rpartition("/")[0]
            # The lease's token makes names unique: a process without lease overwrites nothing.
            name = f"{self.manifest.version + 1:08}-{self.token}-{number:04}.parquet"
            found.append((one.path, f"{table}/{partition}/{name}", one.size))
        return found

    def move(self, staged: list[tuple[str, str, int]], *, hidden: bool = False) -> dict[str, int]:
        """Write a note, then move staged files to their final paths. Returns path -> bytes."""
        prefix = f"{HIDDEN}/compacted/" if hidden else ""
        targets = {prefix + to: size for _, to, size in staged}
        self.note(list(targets))
        for path, to, _ in staged:
            self._folder.rename(path, prefix + to)
        return targets

    def note(self, targets: list[str]) -> None:
        """Write a note of files that are about to be written; deleted if the commit fails."""
        self._lease.check()
        note = {"version": self.manifest.version + 1, "paths": targets}
        self._folder.write(MOVING, json.dumps(note))

    def commit(self, made: Manifest) -> None:
        """Commit the next version, and delete files that are no longer needed."""
        self._lease.check()
        now = int(time.time() * 1000)
        due = [path for path, at in made.dropped if at <= now]
        # Files are deleted after this commit and leave the list with the next one, so that a
        # process that is killed in between deletes them later.
        done = set(due) & set(self._removed)
        made = made.next(dropped=tuple(one for one in made.dropped if one[0] not in done))
        self.manifest, self._base = publish(self._folder, made, self._base)
        self._folder.delete(MOVING)
        for path in due:
            if path not in done:
                self._folder.delete(path)
        self._removed = set(due) - done
        if self.manifest.version % SWEEP_EVERY == 0:
            sweep(self._folder, self.manifest, self._keep_ms)

    def _clear(self) -> None:
        """Delete uncommitted files of a killed predecessor."""
        text = self._folder.read(MOVING)
        if text is not None:
            note = json.loads(text)
            if note["version"] > self.manifest.version:
                for path in note["paths"]:
                    self._folder.delete(path)
            self._folder.delete(MOVING)
        self._folder.delete(STAGING)
        current = {path.split("/")[2] for path in self.manifest.live}
        dropped = [path for path, _ in self.manifest.dropped if path.startswith(LIVE)]
        current |= {path.split("/")[2] for path in dropped}
        for name in self._folder.names(LIVE):
            if name not in current:
                self._folder.delete(f"{LIVE}/{name}")
