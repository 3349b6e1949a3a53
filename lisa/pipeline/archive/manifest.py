"""What an archive consists of: the files that count, and how far it has come.

`_lisa/NNNNNNNN.json` is version N. The highest one that is there is the truth: files that it does
not name are leftovers or not committed yet. It appears by one rename, and by nothing else does
anything become part of the archive. So that a commit costs the same however many files there are,
the long list stands in `_lisa/files-NNNNNNNN.json`, and a version says what has changed since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lisa.core.errors import ConfigError
from lisa.pipeline.archive.records import Gap, TopicRecord

if TYPE_CHECKING:
    from lisa.pipeline.archive.folder import Folder

__all__ = ["HIDDEN", "Manifest", "Swap", "base_of", "load", "publish", "sweep"]

HIDDEN = "_lisa"
MOST_CHANGES = 500
_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Swap:
    """Files that a compaction made: hidden ones are read now, the old ones are still in sight.

    Whoever opened the archive before reads the old ones. An hour later nobody does, and copies of
    the new ones take their places.
    """

    since_ms: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of an archive. All paths are below its directory.

    files: of `message_log` and `messages`, their sizes by path. queries: the last batch of each
    streaming query. offsets: for each journal, by its place, the last event. unfolded: events
    (files of the log) that came since the last fold. live: the events of messages that had not
    ended by then.
    dropped: files that nobody needs from an instant (epoch ms) on.
    """

    version: int = 0
    at_ms: int = 0
    files: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, tuple[str, int]] = field(default_factory=dict)
    topics: dict[str, TopicRecord] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    unfolded: dict[str, int] = field(default_factory=dict)
    live: tuple[str, ...] = ()
    live_events: int = 0
    swaps: tuple[Swap, ...] = ()
    dropped: tuple[tuple[str, int], ...] = ()
    base: int = 0

    def next(self, **changes: Any) -> Manifest:
        """The version after this one."""
        return replace(self, version=self.version + 1, at_ms=int(time.time() * 1000), **changes)


def _path(version: int) -> str:
    return f"{HIDDEN}/{version:0{_DIGITS}}.json"


def _base_path(version: int) -> str:
    return f"{HIDDEN}/files-{version:0{_DIGITS}}.json"


def _versions(names: Iterable[str]) -> list[int]:
    stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit() and len(stem) == _DIGITS)


def load(folder: Folder) -> Manifest | None:
    """The present version, None where there is no archive."""
    while True:
        versions = _versions(folder.names(HIDDEN))
        if not versions:
            return None
        text = folder.read(_path(versions[-1]))
        if text is not None:  # else swept away between the two looks: there is a newer one
            return _read(folder, json.loads(text))


def _read(folder: Folder, told: dict[str, Any]) -> Manifest:
    base = folder.read(_base_path(told["base"])) if told["base"] else None
    files: dict[str, int] = json.loads(base) if base else {}
    for path in told["removed"]:
        files.pop(path, None)
    return Manifest(
        version=told["version"], at_ms=told["at_ms"], files=files | told["added"],
        queries=told["queries"],
        offsets={place: (entry, number) for place, (entry, number) in told["offsets"].items()},
        topics={
            topic: TopicRecord(options, tuple(groups))
            for topic, (options, groups) in told["topics"].items()
        },
        gaps=tuple(
            Gap(**(gap | {"at": datetime.fromisoformat(gap["at"])})) for gap in told["gaps"]
        ),
        unfolded=told["unfolded"], live=tuple(told["live"]), live_events=told["live_events"],
        swaps=tuple(Swap(s["since_ms"], tuple(s["old"]), tuple(s["new"])) for s in told["swaps"]),
        dropped=tuple((path, at) for path, at in told["dropped"]), base=told["base"],
    )  # fmt: skip


def publish(
    folder: Folder, made: Manifest, base: dict[str, int]
) -> tuple[Manifest, dict[str, int]]:
    """Make a version the present one. `base`: the list that it is told against; gives the next.

    Raises ConfigError where somebody else has committed that version.
    """
    added = {path: size for path, size in made.files.items() if base.get(path) != size}
    removed = [path for path in base if path not in made.files]
    if len(added) + len(removed) > MOST_CHANGES:
        folder.write(_base_path(made.version), json.dumps(made.files))
        made, base, added, removed = replace(made, base=made.version), dict(made.files), {}, []
    told = {
        "version": made.version, "at_ms": made.at_ms, "base": made.base, "added": added,
        "removed": removed, "queries": made.queries, "offsets": made.offsets,
        "topics": {t: [dict(r.options), r.groups] for t, r in made.topics.items()},
        "gaps": [asdict(gap) | {"at": gap.at.isoformat()} for gap in made.gaps],
        "unfolded": made.unfolded, "live": made.live, "live_events": made.live_events,
        "swaps": [asdict(swap) for swap in made.swaps], "dropped": made.dropped,
    }  # fmt: skip
    if folder.exists(_path(made.version)):
        # One that slept between its lease's check and here; what another committed stays.
        raise ConfigError(f"another process writes to {folder.where} now: it was quicker")
    folder.write(_path(made.version), json.dumps(told))
    return made, base


def base_of(folder: Folder, made: Manifest) -> dict[str, int]:
    """The list that a version's files are told against."""
    text = folder.read(_base_path(made.base)) if made.base else None
    found: dict[str, int] = json.loads(text) if text else {}
    return found


def sweep(folder: Folder, present: Manifest, keep_ms: int) -> None:
    """Remove versions that nobody reads any more: followed by another for `keep_ms`."""
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
