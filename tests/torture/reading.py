"""Reads a run's files; ledgers become columns, to fit millions of lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.torture.restoring import ARCHIVED
from tests.torture.samples import read_samples
from tests.torture.sent import Messages, lines_of, number_in, read_sent
from tests.torture.traces import read_traces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

CHUNK_BYTES = 1 << 24
COLUMNS = 11

HANDLED = np.dtype(
    [
        ("message", "i4"),
        ("place", "u1"),
        ("attempt", "u2"),
        ("due", "i8"),
        ("begin", "i8"),
        ("end", "i8"),
        ("verdict", "u1"),
        ("asked", "u1"),
        ("begin_by", "i8"),
        ("end_from", "i8"),
        ("process", "u2"),
    ]
)
"""One handling: `message` is the row in `Messages`, `due` in ms, the others in us.

It began between `begin` and `begin_by`, and ended between `end_from` and `end`.
"""


class Handled(NamedTuple):
    """All handlings, and those of messages that no ledger knows."""

    rows: NDArray[Any]
    strangers: list[int]


class Run(NamedTuple):
    """All the data of a run."""

    messages: Messages
    handled: Handled
    events: list[dict[str, Any]]
    stalls: dict[int, list[tuple[int, int]]]
    final: dict[str, Any]
    archived: frozenset[int] = frozenset()
    """Archived messages: if the server loses them, they must be restored."""
    samples: Sequence[dict[str, Any]] = ()
    traces: Sequence[str] = ()
    """Tracebacks in the roles' logs: where, and their last line."""


def load(out: Path) -> Run:
    """Read a run's files from its directory."""
    messages = read_sent(out / "ledgers")
    events = [json.loads(line) for line in lines_of(out / "stage.jsonl")]
    stalls = {
        number_in(path): [(int(a), int(b)) for a, b in (one.split("\t") for one in lines_of(path))]
        for path in (out / "ledgers").glob("handled-*.stalls")
    }
    final = json.loads((out / "final.json").read_text(encoding="utf-8"))
    kept = out / ARCHIVED
    archived = frozenset(json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else ())
    handled = _handled(out / "ledgers", messages)
    samples, traces = read_samples(out / "samples.jsonl"), list(read_traces(out / "logs"))
    return Run(messages, handled, events, stalls, final, archived, samples, traces)


# Handlings


def _handled(folder: Path, messages: Messages) -> Handled:
    parts, strangers = [], list[int]()
    for path in sorted(folder.glob("handled-*.tsv"), key=number_in):
        for numbers in _integers(path):
            part, unknown = _rows(numbers, messages, number_in(path))
            parts.append(part)
            strangers += unknown
    rows = np.concatenate(parts) if parts else np.zeros(0, HANDLED)
    order = np.lexsort((rows["verdict"], rows["begin"], rows["place"], rows["message"]))
    return Handled(_without_beginnings(rows[order]), strangers)


def _integers(path: Path) -> Iterator[NDArray[np.int64]]:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield np.fromstring(whole.decode(), np.int64, sep=" ").reshape(-1, COLUMNS)


def _rows(
    numbers: NDArray[np.int64], messages: Messages, process: int
) -> tuple[NDArray[Any], list[int]]:
    found = np.zeros(len(numbers), HANDLED)
    known = np.zeros(len(numbers), bool)
    senders, places = numbers[:, 0] >> 32, numbers[:, 0] & 0xFFFFFFFF
    for sender in np.unique(senders):
        ours = (senders == sender) & (places < messages.counts.get(int(sender), 0))
        found["message"][ours] = places[ours] + messages.firsts.get(int(sender), 0)
        known |= ours
    names = ("place", "attempt", "due", "begin", "end", "verdict", "asked")
    for column, name in enumerate(names, 1):
        found[name] = numbers[:, column]
    found["begin_by"], found["end_from"] = numbers[:, 9], numbers[:, 10]
    found["process"] = process
    return found[known], [int(one) for one in numbers[~known, 0]]


def _without_beginnings(rows: NDArray[Any]) -> NDArray[Any]:
    """Drop the begin line of each handling whose end is known."""
    if not len(rows):
        return rows
    this, after = rows[:-1], rows[1:]
    ended = (this["end"] == 0) & (after["end"] != 0)
    for name in ("message", "place", "begin", "process"):
        ended &= this[name] == after[name]
    return np.asarray(rows[~np.append(ended, False)])
