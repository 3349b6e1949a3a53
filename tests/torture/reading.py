"""Reads a run's files; ledgers become columns, because an hour has six million messages."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.torture.world import COALESCED, Do, topic_number

CHUNK_BYTES = 1 << 24
ARCHIVED = "archived.json"


def _table(columns: str) -> np.dtype[Any]:
    return np.dtype([(name, kind) for name, kind in (pair.split() for pair in columns.split(","))])


MESSAGES = _table(
    "number i8, topic u1, do u1, taken_back u1, key u2, ttl i4, due i8, tried i8, confirmed i8"
)
"""A sender's record of one message; instants in us, 0 for never. `due` (ms) is the earliest
instant at which it may be handled, by what was first sent under its id; `ttl`: ms, 0 for none;
`key`: a number of the sender's, 0 for none."""

WRITTEN = ("place", "attempt", "due", "begin", "end", "verdict", "asked", "begin_by", "end_from")
"""The columns of a handler's ledger, after the message."""

HANDLED = _table(
    "message i4, place u1, attempt u2, due i8, begin i8, end i8, verdict u1, asked u1, "
    "begin_by i8, end_from i8, process u2"
)
"""One handling: `message` is a row of messages, `due` in ms, the others in us.

It began between `begin` and `begin_by`, and ended between `end_from` and `end` (0: it never did).
On a busy machine, which answers late, these may be a tenth of a second apart.
"""


class TakenBack(IntEnum):
    """Whether a message may have been taken back, so that it need not be handled."""

    NO = 0
    MAYBE = 1  # a cancel, a replacement or a coalesced send with unknown answer
    CANCELLED = 2
    REPLACED = 3  # another message took its place


class Change(NamedTuple):
    """A second call for a message: X cancel, R new due time, D the same id again, P another one in
    its place, U another one with its due time. `ended` is 0 and `answer` empty if no answer is
    known."""

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


class Call(NamedTuple):
    """A running call: its kind, its rows (`old`: the one replaced), and the key of a coalesced
    send."""

    kind: str
    first: int
    size: int
    tried: int
    old: int = -1
    key: str = ""


@dataclass
class Run:
    """All the data of a run.

    messages, handled: record arrays, the first in order of numbers, the second of message, place
        and begin.
    changes: by row of the message.
    odd: the answers to rows with an explicit id that were not `accepted`.
    updated: the rows that have the due time of another one.
    strangers: the numbers of handled messages that no ledger knows.
    archived: the numbers of messages that must be restored if the server loses them.
    traces: tracebacks in the roles' logs: where, and their last line.
    """

    events: list[dict[str, Any]]
    final: dict[str, Any]
    stalls: dict[int, list[tuple[int, int]]]
    messages: Any = field(default_factory=lambda: np.recarray(0, MESSAGES))
    handled: Any = field(default_factory=lambda: np.recarray(0, HANDLED))
    changes: dict[int, Change] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    odd: dict[int, str] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    strangers: list[int] = field(default_factory=list)
    archived: frozenset[int] = frozenset()
    samples: list[dict[str, Any]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)


def load(out: Path) -> Run:
    archived = out / ARCHIVED
    run = Run(
        [json.loads(line) for line in _lines_of(out / "stage.jsonl")],
        json.loads((out / "final.json").read_bytes()),
        {
            _number_in(path): [(int(a), int(b)) for a, b in map(str.split, _lines_of(path))]
            for path in (out / "ledgers").glob("handled-*.stalls")
        },
        archived=frozenset(json.loads(archived.read_bytes()) if archived.exists() else ()),
        samples=[json.loads(line) for line in _lines_of(out / "samples.jsonl")],
        traces=list(_traces(out / "logs")),
    )
    _read_sent(run, out / "ledgers")
    _read_handled(run, out / "ledgers")
    return run


def _number_in(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _lines_of(path: Path) -> Iterator[str]:
    """All complete lines: a line torn by a kill does not count."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield line[:-1]


# What was sent


def _read_sent(run: Run, folder: Path) -> None:
    tables: list[Any] = [run.messages]
    total = 0
    for path in sorted(folder.glob("sent-*.tsv"), key=_number_in):
        sender = _Sender(_number_in(path))
        for line in _lines_of(path):
            sender.read(line)
        tables.append(sender.rows[: sender.count])
        run.changes |= {total + row: change for row, change in sender.changes.items()}
        run.odd |= {total + row: letter for row, letter in sender.odd.items()}
        run.updated |= {total + row for row in sender.updated}
        run.failures += sender.failures
        total += sender.count
    run.messages = np.concatenate(tables).view(np.recarray)


class _Sender:
    """Reads one sender's ledger (`tests.torture.ledger.Book`), line by line."""

    def __init__(self, number: int) -> None:
        self.rows = np.zeros(0, MESSAGES)
        self.count = 0
        self.changes: dict[int, Change] = {}
        self.failures: list[Failure] = []
        self.odd: dict[int, str] = {}
        self.updated: set[int] = set()
        self._number = number
        self._calls: dict[str, Call] = {}
        self._coalesced: dict[str, dict[str, int]] = {}  # the rows of each key, by id

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
            topic, number, size, does, dues, ttl, key = rest
            call = Call("S", _place(number), int(size), at)
            self._add(call, int(topic), does, dues, int(ttl))
            self.rows["key"][call.first : call.first + call.size] = int(key)
            if int(topic) == topic_number(COALESCED):
                call = call._replace(key=key)
                self.rows["taken_back"][list(self._of_key(key).values())] = TakenBack.MAYBE
            return call
        if kind in "PU":
            topic, number, replaced, said = rest
            new, old, due = _place(number), _place(replaced), _due(said, at)
            self._add(Call(kind, new, 1, at), int(topic), f"{int(Do.OK)}", said)
            if kind == "U":  # until the answer tells
                self.rows["due"][new] = min(due, int(self.rows["due"][old]))
        else:
            new = old = _place(rest[0])
            due = _due(rest[1], at) if kind in "DR" else 0
        self.changes[old] = Change(kind, due, at)
        if kind in "PUX":
            self.rows["taken_back"][old] = TakenBack.MAYBE
        return Call(kind, new, 1, at, old)

    def _add(self, call: Call, topic: int, does: str, dues: str, ttl: int = 0) -> None:
        ends = call.first + call.size
        self.count = max(self.count, ends)
        if self.count > len(self.rows):
            grown = np.zeros(max(2 * len(self.rows), self.count), MESSAGES)
            grown[: len(self.rows)] = self.rows
            grown["number"] = (self._number << 32) + np.arange(len(grown))
            self.rows = grown
        part = self.rows[call.first : ends]
        part["topic"], part["tried"], part["ttl"] = topic, call.tried, ttl
        part["do"] = [int(do) for do in does.split(",")]
        part["due"] = [_due(due, call.tried) for due in dues.split(",")]

    def _settled(self, call: Call, at: int, letters: str) -> None:
        if call.kind in "SPUD":
            known = self.rows["confirmed"][call.first : call.first + call.size]
            known[known == 0] = at
        if call.key:
            rows, letter, own_id = self._of_key(call.key), letters[0], letters[1:]
            self.rows["taken_back"][list(rows.values())] = TakenBack.NO
            if letter != "a" and own_id in rows:
                self.rows["taken_back"][rows[own_id]] = TakenBack.REPLACED
            rows[own_id] = call.first
        elif call.kind == "S":
            told = letters if len(letters) > 1 else letters * call.size
            self.odd |= {call.first + n: letter for n, letter in enumerate(told) if letter != "a"}
        if call.kind == "S":
            return
        self.changes[call.old] = self.changes[call.old]._replace(ended=at, answer=letters)
        if call.kind == "X":
            truth = TakenBack.CANCELLED if letters == "c" else TakenBack.NO
            self.rows["taken_back"][call.old] = truth
        elif call.kind in "PU" and letters in "ru":
            self.rows["taken_back"][call.old] = TakenBack.REPLACED
        if call.kind == "U":
            due = self.rows["due"][call.old] if letters == "u" else self.changes[call.old].due
            self.rows["due"][call.first] = due
            self.updated |= {call.first} if letters == "u" else set()

    def _of_key(self, key: str) -> dict[str, int]:
        return self._coalesced.setdefault(key, {})

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


# What was handled


def _read_handled(run: Run, folder: Path) -> None:
    parts, numbers = [run.handled], np.append(run.messages.number, -1)
    for path in sorted(folder.glob("handled-*.tsv"), key=_number_in):
        for lines in _integers(path):
            found = np.zeros(len(lines), HANDLED)
            for column, name in enumerate(WRITTEN, 1):
                found[name] = lines[:, column]
            found["process"] = _number_in(path)
            found["message"] = np.searchsorted(run.messages.number, lines[:, 0])
            known = numbers[found["message"]] == lines[:, 0]
            parts.append(found[known])
            run.strangers += lines[~known, 0].tolist()
    rows: Any = np.concatenate(parts)
    order = np.lexsort((rows["verdict"], rows["begin"], rows["place"], rows["message"]))
    run.handled = _without_beginnings(rows[order]).view(np.recarray)


def _integers(path: Path) -> Iterator[np.typing.NDArray[np.int64]]:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                values = np.fromstring(whole.decode(), np.int64, sep=" ")
                yield values.reshape(-1, 1 + len(WRITTEN))


def _without_beginnings(rows: Any) -> Any:
    """Drop the begin line of each handling whose end is known."""
    this, after = rows[:-1], rows[1:]
    ended = (this["end"] == 0) & (after["end"] != 0)
    for name in ("message", "place", "begin", "process"):
        ended &= this[name] == after[name]
    return rows[~np.append(ended, np.zeros(min(len(rows), 1), bool))]


# What was logged

BEGINS = "Traceback (most recent call last):"
EXPECTED = "tests.torture.handlers.Trouble:"
"""Exceptions that the handlers of a run raise on purpose."""

NOT_JUDGED = ("archive", "restore")  # a JVM reports each killed server in its own way


def _traces(folder: Path) -> Iterator[str]:
    """Tracebacks of unexpected exceptions: file, line, and their last line.

    One torn by a kill has no last line: the next process's output follows, or nothing.
    """
    for path in sorted(folder.glob("*.log")):
        if path.name.startswith(NOT_JUDGED):
            continue
        began = 0
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.startswith(BEGINS):
                    began = number
                elif BEGINS in line:  # an exception group's, indented and framed
                    yield f"{path.name}:{number}: {line.strip()}"
                elif began and line.strip() and not line.startswith(" "):
                    is_torn = line[:4].isdigit() or not line.endswith("\n")  # begins with a time
                    if not is_torn and not line.startswith(EXPECTED):
                        yield f"{path.name}:{began}: {line.strip()}"
                    began = 0
