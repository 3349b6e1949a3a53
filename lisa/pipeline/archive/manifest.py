"""The manifest of an archive in Parquet: its files, and the offsets of its journals.

`_lisa/NNNNNNNN.json` is version N; the highest version is current. Files that it does not list are
leftovers or not committed yet. A commit is the rename that creates the next version. To keep the
cost of a commit independent of the number of files, the full list is in
`_lisa/files-NNNNNNNN.json`, and each version only lists the changes since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord

if TYPE_CHECKING:
    from lisa.pipeline.archive.folder import Folder

HIDDEN = "_lisa"
MOST_CHANGES = 500
_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Swap:
    """A compaction whose old files still exist: readers use the new, hidden files.

    Readers that opened the archive earlier still use the old files. After the retention time
    (`keep`), the new files are copied to the table's directory and the old ones are deleted.
    `since_ms`: epoch ms of the compaction.
    """

    since_ms: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of an archive. All paths are relative to its directory.

    at_ms: epoch ms of its commit.
    files: path -> bytes of the files of `message_log` and `messages`.
    queries: streaming query -> its last committed batch.
    offsets: journal -> entry id and number of its last event.
    unfolded: path -> bytes of the log files written since the last fold.
    live: files with the events of messages that had not ended at the last fold; `live_events` is
        the number of these events.
    dropped: files to delete, with the epoch ms from which they may be deleted.
    base: the version whose full list of files this version's changes refer to.
    """

    version: int = 0
    at_ms: int = 0
    files: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, tuple[str, int]] = field(default_factory=dict)
    topics: dict[str, TopicRecord] = field(default_factory=dict)
    gaps: tuple[ArchiveGap, ...] = ()
    unfolded: dict[str, int] = field(default_factory=dict)
    live: tuple[str, ...] = ()
    live_events: int = 0
    swaps: tuple[Swap, ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    base: int = 0

    def next(self, **changes: Any) -> Manifest:
        """The next version, with changes."""
        return replace(self, version=self.version + 1, at_ms=int(time.time() * 1000), **changes)


def _path(version: int) -> str:
    return f"{HIDDEN}/{version:0{_DIGITS}}.json"


def _base_path(version: int) -> str:
    return f"{HIDDEN}/files-{version:0{_DIGITS}}.json"


def _versions(names: Iterable[str]) -> list[int]:
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit() and len(stem) == _DIGITS)


def load(folder: Folder) -> Manifest | None:
    """The current version, None without an archive."""
    while True:
        versions = _versions(folder.names(HIDDEN))
        if not versions:
            return None
        text = folder.read(_path(versions[-1]))
        if text is not None:  # else deleted since it was listed: a newer version exists
            return _read(folder, json.loads(text))


def _read(folder: Folder, document: dict[str, Any]) -> Manifest:
    files = base_of(folder, document["base"])
    for path in document["removed"]:
        files.pop(path, None)
    return msgspec.convert(document | {"files": files | document["added"]}, Manifest)


def publish(
    folder: Folder, made: Manifest, base: dict[str, int]
) -> tuple[Manifest, dict[str, int]]:
    """Commit a version; returns it and the full list of files for the next commit.

    base: path -> bytes, the full list that this version's changes refer to.

    Raises ConfigError if another process has committed this version.
    """
    added = {path: size for path, size in made.files.items() if base.get(path) != size}
    removed = [path for path in base if path not in made.files]
    if len(added) + len(removed) > MOST_CHANGES:
        folder.write(_base_path(made.version), json.dumps(made.files))
        made, base, added, removed = replace(made, base=made.version), dict(made.files), {}, []
    document = asdict(replace(made, files={}))
    del document["files"]
    document |= {"added": added, "removed": removed}
    if folder.exists(_path(made.version)):
        # This process was suspended after it checked its lease; keep the other one's commit.
        raise ConfigError(f"another process has committed to {folder.where}; this one must stop")
    folder.write(_path(made.version), json.dumps(document, default=datetime.isoformat))
    return made, base


def base_of(folder: Folder, version: int) -> dict[str, int]:
    """The full list of files (path -> bytes) of a base version; empty for version 0."""
    text = folder.read(_base_path(version)) if version else None
    found: dict[str, int] = json.loads(text) if text else {}
    return found


def sweep(folder: Folder, present: Manifest, keep_ms: int) -> None:
    """Delete versions that were replaced more than `keep_ms` before the current one."""
    names = folder.names(HIDDEN)
    versions = _versions(names)
    kept = [v for v in versions if v >= present.version]
    for version, follower in zip(reversed(versions[:-1]), reversed(versions), strict=False):
        text = folder.read(_path(follower))
        if text is None or present.at_ms - json.loads(text)["at_ms"] > keep_ms:
            break
        kept.append(version)
    for version in set(versions) - set(kept):
        folder.delete(_path(version))
    oldest = min(kept, default=0)
    text = folder.read(_path(oldest))
    needed = json.loads(text)["base"] if text else 0
    for name in names:
        stem = name.removeprefix("files-").removesuffix(".json")
        if name.startswith("files-") and stem.isdigit() and int(stem) < needed:
            folder.delete(f"{HIDDEN}/{name}")
