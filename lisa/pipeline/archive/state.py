"""What an archive knows besides the rows of its tables.

A document in `_lisa/state` is written before each commit, under a new random number. The commit
contains this number as an application transaction, so that table and document change together.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from lisa.core.model.errors import LisaError
from lisa.pipeline.archive.records import ArchiveGap, TopicRecord
from lisa.pipeline.archive.table import STATE, ArchiveTable

if TYPE_CHECKING:
    from collections.abc import Collection

    from lisa.pipeline.archive.folder import Folder

HIDDEN = "_lisa"
RANDOM_BITS = 20
_TRIES = 5


class LogState(msgspec.Struct, frozen=True):
    """The state of `message_log`.

    number: of the document; 0 in a new archive.
    offsets: journal -> entry id and number of its last event.
    fold: number of the state of `messages` at the time of the commit.
    unfolded_events, unfolded_from_ms: number of events since that fold, and the time of the
        earliest (epoch ms).
    """

    number: int = 0
    offsets: dict[str, tuple[str, int]] = {}
    topics: dict[str, TopicRecord] = {}
    gaps: tuple[ArchiveGap, ...] = ()
    fold: int = 0
    unfolded_events: int = 0
    unfolded_from_ms: int = 0


class FoldState(msgspec.Struct, frozen=True):
    """The state of `messages`.

    log: number of the state of `message_log` that was folded; offsets: its offsets.
    live: directory with the events of messages that had not ended; `live_events` is their number.
    seconds: how long the fold took.
    """

    number: int = 0
    log: int = 0
    offsets: dict[str, tuple[str, int]] = {}
    live: str = ""
    live_events: int = 0
    seconds: float = 0.0


_State = TypeVar("_State", LogState, FoldState)


def new_number() -> int:
    """A new number for a document or a directory; contains the time in ms, see `age_s`."""
    return int(time.time() * 1000) << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


def age_s(number: int) -> float:
    """Seconds since a number was made."""
    return time.time() - (number >> RANDOM_BITS) / 1000


def path(number: int) -> str:
    """The path of a document."""
    return f"{HIDDEN}/state/{number}.json"


def staging(number: int) -> str:
    """The directory of files that no commit names yet."""
    return f"{HIDDEN}/staging/{number}"


def live_folder(number: int) -> str:
    """The directory of the events of live messages, as of a fold."""
    return f"{HIDDEN}/live/{number}"


def save(folder: Folder, state: LogState | FoldState) -> None:
    """Write a document; it counts once a commit names it."""
    folder.write(path(state.number), msgspec.json.encode(state).decode())


def load_states(
    folder: Folder, log: ArchiveTable, messages: ArchiveTable
) -> tuple[LogState, FoldState]:
    """The states of both tables, after refreshing them to versions that belong together."""
    for _ in range(_TRIES):
        messages.refresh()
        fold = _load(folder, messages, FoldState)
        log.refresh()
        found = _load(folder, log, LogState)
        if fold is None or found is None:
            continue  # replaced and deleted meanwhile
        if fold.number == found.fold or fold.log == found.number:
            return found, fold
        # A fold between the two reads. If it stays like this, one table was restored from an older
        # copy: then events of any time may be new to the fold.
        found = msgspec.structs.replace(found, unfolded_from_ms=0)
    if fold is None or found is None:
        raise LisaError(f"{folder.url(HIDDEN)}/state lacks the document of the last commit")
    return found, fold


def _load(folder: Folder, table: ArchiveTable, kind: type[_State]) -> _State | None:
    number = table.transaction(STATE)
    if not number:
        return kind()
    text = folder.read(path(number))
    return None if text is None else msgspec.json.decode(text, type=kind)


def sweep(folder: Folder, used: Collection[str], keep_s: float) -> None:
    """Delete leftovers: documents, staged files and live events that are not used.

    One that was in use was replaced by the next of its kind; it is kept for `keep_s` from then on.
    """
    for kind in ("state", "staging", "live"):
        found = {}
        for name in folder.names(f"{HIDDEN}/{kind}"):
            number = name.removesuffix(".json").lstrip(".")
            if number.isdigit():
                found[name] = int(number)
        names = sorted(found, key=found.__getitem__)
        for name, following in zip(names, [*names[1:], *names[-1:]], strict=True):
            whole = f"{HIDDEN}/{kind}/{name}"
            if whole not in used and age_s(found[following]) >= keep_s:
                folder.delete(whole)
