"""The ledgers of a run as columns: six million messages are to fit into a checker's memory.

A file of a process that was killed may end in the middle of a line; that line never counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.torture.restoring import ARCHIVED
from tests.torture.world import Do

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["HANDLED", "Call", "Handled", "Messages", "Move", "Run", "TakenBack", "load"]

CHUNK_BYTES = 1 << 24
COLUMNS = 9

HANDLED = np.dtype([
    ("message", "i4"), ("place", "u1"), ("attempt", "u2"), ("due", "i8"), ("begin", "i8"),
    ("end", "i8"), ("verdict", "u1"), ("asked", "u1"), ("process", "u2"),
])  # fmt: skip
"""One handling: `message` is the row in `Messages`, `due` in ms, `begin` and `end` in us."""

MESSAGES = np.dtype([
    ("topic", "u1"), ("do", "u1"), ("taken_back", "u1"), ("ttl", "i4"),
    ("due", "i8"), ("tried", "i8"), ("confirmed", "i8"), ("cancelled", "i8"),
])  # fmt: skip
"""What a sender knows of one message; instants in us, 0 for never. `due` (ms) is the earliest
instant at which it may be handled, by what was sent under its id; `ttl`: ms, 0 for none."""


class TakenBack(IntEnum):
    """Whether a message may have been taken back, so that nobody need handle it."""

    NO = 0
    MAYBE = 1  # a cancel whose answer is not known
    CANCELLED = 2
    REPLACED = 3  # another message was, or may have been, put in its place


class Move(NamedTuple):
    """A new due time that was asked for (and given: `confirmed` is not 0)."""

    due: int
    tried: int
    confirmed: int


@dataclass
class Messages:
    """All that was ever attempted, in one table; senders one after the other."""

    rows: NDArray[Any]
    firsts: dict[int, int]
    """Sender -> row of its first message."""
    counts: dict[int, int]
    moves: dict[int, Move] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)

    def row(self, number: int) -> int | None:
        """The row of a message's number; None if no ledger knows it."""
        sender, place = number >> 32, number & 0xFFFFFFFF
        if place >= self.counts.get(sender, 0):
            return None
        return self.firsts[sender] + place

    def number(self, row: int) -> int:
        """The other way round."""
        sender = max((first, one) for one, first in self.firsts.items() if first <= row)[1]
        return (sender << 32) + row - self.firsts[sender]


class Handled(NamedTuple):
    """All handlings, and those of messages that no ledger knows."""

    rows: NDArray[Any]
    strangers: list[int]


class Run(NamedTuple):
    """All that a run left behind."""

    messages: Messages
    handled: Handled
    events: list[dict[str, Any]]
    stalls: dict[int, list[tuple[int, int]]]
    final: dict[str, Any]
    archived: frozenset[int] = frozenset()
    """Messages that an archive has: what the server loses of them is to be restored."""


def load(out: Path) -> Run:
    """Read what a run left in its directory."""
    messages = _messages(out / "ledgers")
    events = [json.loads(line) for line in _lines(out / "stage.jsonl")]
    stalls = {
        _number(path): [(int(a), int(b)) for a, b in (one.split("\t") for one in _lines(path))]
        for path in (out / "ledgers").glob("handled-*.stalls")
    }
    final = json.loads((out / "final.json").read_text(encoding="utf-8"))
    kept = out / ARCHIVED
    archived = frozenset(json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else ())
    handled = _handled(out / "ledgers", messages)
    return Run(messages, handled, events, stalls, final, archived)


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line[:-1]


# What was sent


class Call(NamedTuple):
    """A call under way: its kind, and the rows that it concerns."""

    kind: str
    first: int
    size: int
    due: int
    tried: int


def _messages(folder: Path) -> Messages:
    tables = []
    firsts, counts, errors = dict[int, int](), dict[int, int](), dict[str, int]()
    moves: dict[int, Move] = {}
    total = 0
    for path in sorted(folder.glob("sent-*.tsv"), key=_number):
        sender = _Sender()
        for line in _lines(path):
            sender.read(line)
        number = _number(path)
        firsts[number], counts[number] = total, sender.count
        tables.append(sender.rows[: sender.count])
        moves |= {total + row: move for row, move in sender.moves.items()}
        for name, n in sender.errors.items():
            errors[name] = errors.get(name, 0) + n
        total += sender.count
    rows = np.concatenate(tables) if tables else np.zeros(0, MESSAGES)
    return Messages(rows, firsts, counts, moves, errors)


class _Sender:
    """One sender's ledger, read line by line."""

    def __init__(self) -> None:
        self.rows = np.zeros(1024, MESSAGES)
        self.count = 0
        self.moves: dict[int, Move] = {}
        self.errors: dict[str, int] = {}
        self._calls: dict[str, Call] = {}

    def read(self, line: str) -> None:
        kind, call, instant, *rest = line.split("\t")
        at = int(instant)
        if kind == "C":
            self._settled(self._calls.pop(call), at, rest[0])
        elif kind == "E":
            self._failed(self._calls.pop(call), at, int(rest[0]), rest[1])
        else:
            self._calls[call] = self._tried(kind, at, rest)

    def _tried(self, kind: str, at: int, rest: list[str]) -> Call:
        if kind == "S":
            return self._sent(at, rest)
        if kind == "P":
            new, old = _place(rest[1]), _place(rest[2])
            due = _due(rest[3], at)
            self._add(new, 1)
            self.rows[new] = (int(rest[0]), Do.OK, TakenBack.NO, 0, due, at, 0, 0)
            self.rows["taken_back"][old] = TakenBack.REPLACED
            return Call(kind, new, 1, due, at)
        row = _place(rest[0])
        due = _due(rest[1], at) if kind in "DR" else 0
        if kind == "D":  # if the first send never arrived, this one says when
            self.rows["due"][row] = min(self.rows["due"][row], due)
        elif kind == "X":
            self.rows["taken_back"][row] = TakenBack.MAYBE
        else:
            self.moves[row] = Move(due, at, 0)
        return Call(kind, row, 1, due, at)

    def _sent(self, at: int, rest: list[str]) -> Call:
        topic, number, count = int(rest[0]), _place(rest[1]), int(rest[2])
        self._add(number, count)
        part = self.rows[number : number + count]
        part["topic"], part["tried"], part["ttl"] = topic, at, int(rest[5])
        part["do"] = [int(one) for one in rest[3].split(",")]
        part["due"] = [_due(one, at) for one in rest[4].split(",")]
        return Call("S", number, count, 0, at)

    def _add(self, first: int, count: int) -> None:
        self.count = max(self.count, first + count)
        if self.count > len(self.rows):
            grown = np.zeros(max(2 * len(self.rows), self.count), MESSAGES)
            grown[: len(self.rows)] = self.rows
            self.rows = grown

    def _settled(self, call: Call, at: int, letters: str) -> None:
        part = slice(call.first, call.first + call.size)
        if call.kind in "SPD":
            known = self.rows["confirmed"][part]
            known[known == 0] = at
        elif call.kind == "X":
            truth = TakenBack.CANCELLED if letters == "c" else TakenBack.NO
            self.rows["taken_back"][call.first] = truth
            self.rows["cancelled"][call.first] = at if truth else 0
        elif call.kind == "R" and letters == "r":
            self.moves[call.first] = Move(call.due, call.tried, at)
        # Else it stays a perhaps: the answer is that of the last try, and one whose reply was lost
        # may have moved the message before; it was taken meanwhile.

    def _failed(self, call: Call, at: int, settled: int, name: str) -> None:
        self.errors[name] = self.errors.get(name, 0) + 1
        if settled and call.kind == "S":
            self.rows["confirmed"][call.first : call.first + settled] = at


def _place(number: str) -> int:
    return int(number) & 0xFFFFFFFF


def _due(said: str, low_us: int) -> int:
    """The earliest instant, in ms: a delay counts from when Redis had the call."""
    return int(said) if said[0] != "+" else low_us // 1000 + int(said)


# What was handled


def _handled(folder: Path, messages: Messages) -> Handled:
    parts, strangers = [], list[int]()
    for path in sorted(folder.glob("handled-*.tsv"), key=_number):
        for numbers in _integers(path):
            part, unknown = _rows(numbers, messages, _number(path))
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
    found["process"] = process
    return found[known], [int(one) for one in numbers[~known, 0]]


def _without_beginnings(rows: NDArray[Any]) -> NDArray[Any]:
    """A handling whose end is known stands there once: its line of the beginning goes."""
    if not len(rows):
        return rows
    this, after = rows[:-1], rows[1:]
    ended = (this["end"] == 0) & (after["end"] != 0)
    for name in ("message", "place", "begin", "process"):
        ended &= this[name] == after[name]
    return np.asarray(rows[~np.append(ended, False)])
