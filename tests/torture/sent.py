"""The senders' ledgers as columns: six million messages must fit into a checker's memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.torture.world import Do

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MESSAGES = np.dtype(
    [
        ("topic", "u1"),
        ("do", "u1"),
        ("taken_back", "u1"),
        ("ttl", "i4"),
        ("due", "i8"),
        ("tried", "i8"),
        ("confirmed", "i8"),
    ]
)
"""A sender's record of one message; instants in us, 0 for never. `due` (ms) is the earliest
instant at which it may be handled, by what was first sent under its id; `ttl`: ms, 0 for none."""


class TakenBack(IntEnum):
    """Whether a message may have been taken back, so that it need not be handled."""

    NO = 0
    MAYBE = 1  # a cancel or a replacement with unknown answer
    CANCELLED = 2
    REPLACED = 3  # another message took its place


class Change(NamedTuple):
    """A second call for a message: X cancel, R new due time, D the same id again, P another one in
    its place. `ended` is 0 and `answer` empty if no answer is known."""

    kind: str
    due: int
    tried: int
    ended: int = 0
    answer: str = ""


class Failure(NamedTuple):
    """A call that ended in an error: sender, message (the first of many), time and error."""

    process: int
    number: int
    tried: int
    at: int
    name: str


@dataclass
class Messages:
    """All attempted messages in one table, sender by sender.

    `changes` are by row. `odd` are rows of messages with an explicit id that were not `accepted`.
    """

    rows: NDArray[Any]
    firsts: dict[int, int]
    """Sender -> row of its first message."""
    counts: dict[int, int]
    changes: dict[int, Change] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    odd: dict[int, str] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, int]:
        """How many calls ended in which error."""
        return dict(Counter(one.name for one in self.failures))

    def row(self, number: int) -> int | None:
        """The row of a message's number; None if no ledger knows it."""
        sender, place = number >> 32, number & 0xFFFFFFFF
        if place >= self.counts.get(sender, 0):
            return None
        return self.firsts[sender] + place

    def number(self, row: int) -> int:
        """The number of a row."""
        sender = max((first, one) for one, first in self.firsts.items() if first <= row)[1]
        return (sender << 32) + row - self.firsts[sender]


def number_in(path: Path) -> int:
    """The number of the process that wrote this ledger."""
    return int(path.stem.partition("-")[2])


def lines_of(path: Path) -> Iterator[str]:
    """All complete lines: a line torn by a kill does not count."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line[:-1]


class Call(NamedTuple):
    """A running call: its kind, and its rows (`old`: the one replaced)."""

    kind: str
    first: int
    size: int
    tried: int
    old: int = -1


def read_sent(folder: Path) -> Messages:
    """All senders' ledgers of a folder."""
    tables = []
    found = Messages(np.zeros(0, MESSAGES), {}, {})
    total = 0
    for path in sorted(folder.glob("sent-*.tsv"), key=number_in):
        number = number_in(path)
        sender = _Sender(number)
        for line in lines_of(path):
            sender.read(line)
        found.firsts[number], found.counts[number] = total, sender.count
        tables.append(sender.rows[: sender.count])
        found.changes |= {total + row: change for row, change in sender.changes.items()}
        found.odd |= {total + row: letter for row, letter in sender.odd.items()}
        found.failures += sender.failures
        total += sender.count
    if tables:
        found.rows = np.concatenate(tables)
    return found


class _Sender:
    """Reads one sender's ledger, line by line."""

    def __init__(self, number: int) -> None:
        self.rows = np.zeros(1024, MESSAGES)
        self.count = 0
        self.changes: dict[int, Change] = {}
        self.failures: list[Failure] = []
        self.odd: dict[int, str] = {}
        self._number = number
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
            self.rows[new] = (int(rest[0]), Do.OK, TakenBack.NO, 0, due, at, 0)
            self.rows["taken_back"][old] = TakenBack.MAYBE
            self.changes[old] = Change(kind, due, at)
            return Call(kind, new, 1, at, old)
        row = _place(rest[0])
        self.changes[row] = Change(kind, _due(rest[1], at) if kind in "DR" else 0, at)
        if kind == "X":
            self.rows["taken_back"][row] = TakenBack.MAYBE
        return Call(kind, row, 1, at, row)

    def _sent(self, at: int, rest: list[str]) -> Call:
        topic, number, count = int(rest[0]), _place(rest[1]), int(rest[2])
        self._add(number, count)
        part = self.rows[number : number + count]
        part["topic"], part["tried"], part["ttl"] = topic, at, int(rest[5])
        part["do"] = [int(one) for one in rest[3].split(",")]
        part["due"] = [_due(one, at) for one in rest[4].split(",")]
        return Call("S", number, count, at)

    def _add(self, first: int, count: int) -> None:
        self.count = max(self.count, first + count)
        if self.count > len(self.rows):
            grown = np.zeros(max(2 * len(self.rows), self.count), MESSAGES)
            grown[: len(self.rows)] = self.rows
            self.rows = grown

    def _settled(self, call: Call, at: int, letters: str) -> None:
        if call.kind in "SPD":
            known = self.rows["confirmed"][call.first : call.first + call.size]
            known[known == 0] = at
        if call.kind == "S":
            told = letters if len(letters) > 1 else letters * call.size
            self.odd |= {call.first + n: one for n, one in enumerate(told) if one != "a"}
            return
        self.changes[call.old] = self.changes[call.old]._replace(ended=at, answer=letters)
        if call.kind == "X":
            truth = TakenBack.CANCELLED if letters == "c" else TakenBack.NO
            self.rows["taken_back"][call.old] = truth
        elif call.kind == "P" and letters == "r":
            self.rows["taken_back"][call.old] = TakenBack.REPLACED

    def _failed(self, call: Call, at: int, settled: int, name: str) -> None:
        number = (self._number << 32) + call.first
        self.failures.append(Failure(self._number, number, call.tried, at, name))
        if settled and call.kind == "S":
            self.rows["confirmed"][call.first : call.first + settled] = at


def _place(number: str) -> int:
    return int(number) & 0xFFFFFFFF


def _due(said: str, low_us: int) -> int:
    """The earliest instant, in ms: a delay counts from when Redis got the call."""
    return int(said) if said[0] != "+" else low_us // 1000 + int(said)
