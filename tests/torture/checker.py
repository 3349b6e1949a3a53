"""Finds messages lost, early, late, stuck, or handled after a cancel or again without a reason.

It reads a run's files: the ledgers, the stage's events, and the final state. It never asks Redis.
Each function of `JUDGES` judges one rule.
"""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lisa.core.model import errors
from tests.torture.causes import ACK_US, SETTLES_US, SLACK_US, Causes, meet
from tests.torture.reading import Change, Run, TakenBack
from tests.torture.world import (
    ANSWERS_OF_TROUBLE,
    AT_ONCE,
    COALESCED,
    FOREIGN,
    LANES,
    LIMITED,
    MINUTE_MS,
    MOST_GROUPS,
    ORDERED,
    POISON_RETRIES,
    TICKS,
    TOPICS,
    WINDOWED,
    Do,
    Verdict,
    is_open,
    may_be_due_before,
    opening,
    pause_ms,
    place_number,
    topic_number,
)

CLOCKS_US = 2_000
"""How far two processes' readings of Redis's clock may differ, beyond the bounds they note."""

UNSURE_US = 500_000
"""How far off a process's estimate of Redis's clock may be when it could not ask Redis."""

FAULTS = (
    "lost",
    "early",
    "late",
    "after cancel",
    "after replace",
    "at once",
    "out of order",
    "stuck",
    "unexplained",
)


class Finding(NamedTuple):
    """A message (0: none in particular), and what is wrong with it."""

    number: int
    what: str


@dataclass
class Verdicts:
    """`guilty` is empty after a clean run; `excused` has what a fault explains, by kind."""

    guilty: dict[str, list[Finding]] = field(default_factory=lambda: {kind: [] for kind in FAULTS})
    excused: dict[str, list[Finding]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        return not any(self.guilty.values())


class Case:
    """A run's data and the verdicts so far.

    `is_first` marks the first handling of a message in a group; `least` is the earliest instant at
    which each handling can have begun, `latest` (ms) the latest due time that the answer to a
    message's sender allows for, and `latest_moved` the same after a confirmed new due time;
    `garbage` has the number and the place of messages that ended there; `lane` is a number of each
    handling's key, 0 for none.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.messages, self.handled = run.messages, run.handled
        rows = self.handled
        self.causes = Causes(run.events, run.stalls)
        self.verdicts = Verdicts()
        self._message = np.ascontiguousarray(rows.message)  # cached: used for each change
        self.is_first = np.ones(len(rows), bool)
        self.is_first[1:] = np.diff(rows.message).astype(bool) | (rows.place[1:] != rows.place[:-1])
        self.least = np.where(rows.asked == 1, rows.begin, rows.begin - UNSURE_US)
        took = (self.messages.confirmed - self.messages.tried + CLOCKS_US) // 1000
        self.latest = self.messages.due + took + 1
        self.latest_moved = self.latest.copy()
        for message, change, _ in self.changes("R", "r"):
            allowed_ms = (change.ended - change.tried + CLOCKS_US) // 1000 + 1
            self.latest_moved[message] = change.due + allowed_ms
        sent = self.messages
        lane = (sent.topic.astype(np.int64) << 56) + (sent.number >> 32 << 16) + sent.key
        self.lane = np.where(sent.key > 0, lane, 0)[rows.message]
        self.garbage = {
            (row["number"], place_number(row["topic"], row["group"]))
            for row in run.final["live"]
            if row["state"] == "garbage"
        }

    def accuse(self, fault: str, number: int, what: str, *, excused: str | None = None) -> None:
        """A finding. excused: why it is none, if a fault explains it."""
        if excused is None:
            self.verdicts.guilty[fault].append(Finding(int(number), what))
        else:
            finding = Finding(int(number), f"{what}: {excused}")
            self.verdicts.excused.setdefault(fault, []).append(finding)

    def row(self, number: int) -> int | None:
        row = int(np.searchsorted(self.messages.number, number))
        is_known = row < len(self.messages) and self.messages.number[row] == number
        return row if is_known else None

    def number(self, row: int) -> int:
        return int(self.messages.number[self.handled.message[row]])

    def changes(self, kind: str, answer: str) -> Iterator[tuple[int, Change, range]]:
        """Second calls of a kind with that answer: message, call, rows of its handlings."""
        for message, change in self.run.changes.items():
            if change.kind == kind and change.answer == answer:
                yield message, change, self.handlings(message)

    def handlings(self, message: int) -> range:
        """The rows of a message's handlings."""
        here = np.searchsorted(self._message, np.array([message, message + 1], "i4"))
        return range(int(here[0]), int(here[1]))

    def owes_its_first(self, message: int, change: Change) -> bool:
        """Whether Redis had confirmed a message before a second call began, and still had it.

        A message that another program deleted, or the server lost, counts as never sent.
        """
        sent = self.messages[message]
        return bool(
            0 < sent.confirmed <= change.tried
            and not self.causes.loss_of(sent.confirmed)
            and int(sent.number) not in self.causes.deleted
        )


def _rows(which: NDArray[np.bool_]) -> list[int]:
    """The numbers of the rows that a mask selects."""
    found: list[int] = np.nonzero(which)[0].tolist()
    return found


def check(run: Run) -> Verdicts:
    """Judge a run."""
    case = Case(run)
    for judge in JUDGES:
        judge(case)
    return case.verdicts


def count(case: Case) -> None:
    sent, handled, counts = case.messages, case.handled, case.verdicts.counts
    counts["attempted"] = len(sent)
    counts["confirmed"] = int((sent.confirmed > 0).sum())
    counts["cancelled"] = int((sent.taken_back == TakenBack.CANCELLED).sum())
    counts["moved"] = sum(1 for _ in case.changes("R", "r"))
    counts["replaced"] = int((sent.taken_back == TakenBack.REPLACED).sum())
    counts["handlings"] = len(handled)
    counts["handlings held to account"] = int(case.causes.accountable(handled).sum())
    for verdict in Verdict:
        counts[f"handlings: {verdict.name.lower()}"] = int((handled.verdict == verdict).sum())
    counts["garbage"] = len(case.garbage)


# Lost

NEAR_MS, FEW = 1_000, 10
"""This many messages due this close to another one show whether all was well then."""


def lost(case: Case) -> None:
    """Confirmed, but never handled, and not in garbage."""
    sent, causes = case.messages, case.causes
    live = {(row["number"], row["group"]) for row in case.run.final["live"]}
    for row, group in zip(*np.nonzero(_owed(case)), strict=True):
        message = sent[row]
        number, topic = int(message.number), TOPICS[message.topic]
        if message.ttl and number not in causes.deleted:
            _let_expire(case, message)
            continue
        if (number, topic.groups[group]) in live or (number, None) in live:
            continue  # stuck, and reported there
        what = f"{topic.name}/{topic.groups[group]}, {Do(message.do).name}"
        loss, excused = causes.loss_of(message.confirmed), None
        if number in causes.deleted:
            excused = "a foreign hand deleted its body"
        elif loss and number in case.run.archived:
            what += ": archived, yet not restored"
        elif loss:
            before_s = (loss.until - message.confirmed) / 1e6
            excused = f"confirmed {before_s:.3f} s before the server's kill"
        case.accuse("lost", number, what, excused=excused)
    stats = case.run.final["stats"].values()
    told = sum(topic.get("expired", 0) + topic.get("skipped", 0) for topic in stats)
    unhandled = case.verdicts.counts["expired"]
    if unhandled > told and not causes.windows["loss"]:
        case.accuse("lost", 0, f"{unhandled} with a ttl unhandled, {told} expired or skipped")


def _owed(case: Case) -> NDArray[np.bool_]:
    """By message and group: confirmed, neither handled, nor in garbage, nor taken back."""
    sent = case.messages
    groups = np.array([len(topic.groups) for topic in TOPICS])[sent.topic]
    is_owed = (sent.confirmed > 0) & (sent.taken_back == 0)
    owed = is_owed[:, None] & (np.arange(MOST_GROUPS) < groups[:, None])
    well = case.handled[case.handled.verdict == Verdict.OK]
    owed[well.message, well.place % MOST_GROUPS] = False
    for number, place in case.garbage:
        if (row := case.row(number)) is not None:
            owed[row, place % MOST_GROUPS] = False
    return np.asarray(owed)


def _let_expire(case: Case, message: Any) -> None:
    """A ttl is no excuse without a fault if others with that due time were handled in time."""
    case.verdicts.counts["expired"] += 1
    due, ttl = int(message.due), int(message.ttl)
    if case.causes.first((due - NEAR_MS) * 1000, (due + ttl + NEAR_MS) * 1000, "any"):
        return
    rows = case.handled
    beside = rows[
        (case.messages.topic[rows.message] == message.topic)
        & (rows.attempt == 1)
        & (abs(rows.due - due) < NEAR_MS)
    ]
    late = beside.begin // 1000 - beside.due
    if len(late) >= FEW and late.max() < ttl / 10:
        what = f"let expire, though {len(late)} due with it were handled in {late.max()} ms"
        case.accuse("lost", message.number, what)


# Early and late

LATE_US = ACK_US
"""Without a fault, the latest time after due for the first handling of a message."""

TRIES_US = 5_000_000
"""By then a call has ended, with success or failure."""

EXPIRES_WITHIN_US = 1_000_000
"""How long a message opened within its ttl may wait for a handler before it is released."""


def early(case: Case) -> None:
    """Handled before it was due, by the message's due time or by its sender's."""
    rows = case.handled

    def accuse(row: int, what: str) -> None:
        case.accuse("early", case.number(row), f"{what}, attempt {rows.attempt[row]}")

    for row in _rows(rows.begin < rows.due * 1000):
        by = (rows.due[row] * 1000 - rows.begin[row]) / 1000
        accuse(row, f"{by:.3f} ms before its due time")
    earliest = case.messages.due.copy()
    for message, change in case.run.changes.items():
        # A repeat has no effect, unless the first send never arrived.
        says_when = change.kind == "D" and not case.owes_its_first(message, change)
        if says_when or change.kind == "R":
            earliest[message] = min(earliest[message], change.due)
    keeps_due = [
        topic == topic_number(COALESCED) and may_be_due_before(int(key))
        for topic, key in zip(case.messages.topic, case.messages.key, strict=True)
    ]
    earliest[keeps_due] = 0
    promised = earliest[rows.message]
    for row in _rows((rows.attempt == 1) & (rows.due < promised)):
        by = promised[row] - rows.due[row]
        accuse(row, f"its due time was {by} ms before what was asked for")
    for message, change, here in case.changes("R", "r"):
        if change.due <= earliest[message] or case.causes.loss_of(change.ended):
            continue
        for row in here:
            # Otherwise it is uncertain: an attempt whose reply was lost may have moved it before.
            is_after = rows.attempt[row] == 1 and rows.begin[row] > change.ended
            if is_after and rows.due[row] < change.due:
                accuse(row, f"{change.due - rows.due[row]} ms before its new due time")


def late(case: Case) -> None:
    """First handled long after it was due, and after its lane was in use, without a fault."""
    rows, windows = case.handled, case.causes.windows
    due = np.maximum(rows.due * 1000, case.messages.tried[rows.message])
    for lane in _lanes(case):
        begun = lane[np.argsort(rows.begin[lane])]
        used = np.maximum.accumulate(np.maximum(rows.begin, rows.end)[begun])
        due[begun[1:]] = np.maximum(due[begun[1:]], used[:-1])
    found = case.is_first & (rows.attempt == 1) & (case.least - due > LATE_US)
    excuses = [*windows["any"], *windows["loss"], *windows["stall"]]
    found[found] = ~meet(excuses, due[found], case.least[found])
    for row in _rows(found):
        message = case.messages[rows.message[row]]
        until = message.confirmed or message.tried + TRIES_US
        if case.causes.first(message.tried, until, "loss"):
            continue  # the server lost it, and an archive restored it
        by = (case.least[row] - due[row]) / 1e6
        case.accuse("late", message.number, f"{by:.3f} s, with nothing in the way")


def late_by_its_due_time(case: Case) -> None:
    """Due later than its sender requested.

    Not after a repair or a loss, when a message is due immediately. A repeated send may have been
    the first to arrive. Messages with windows have a judge of their own.
    """
    rows, causes, latest = case.handled, case.causes, case.latest_moved
    asked = case.is_first & (rows.attempt == 1) & (case.messages.confirmed[rows.message] > 0)
    asked &= case.messages.topic[rows.message] != topic_number(WINDOWED)
    for row in _rows(asked & (rows.due > latest[rows.message])):
        message, number = int(rows.message[row]), case.number(row)
        tried = case.messages.tried[message]
        if ("message", number) in causes.windows or causes.first(tried, rows.begin[row], "loss"):
            continue
        change = case.run.changes.get(message)
        if change is not None:
            may_be_moved = change.kind == "R" and change.answer != "r"
            if may_be_moved or (change.kind == "D" and not case.owes_its_first(message, change)):
                continue
        if message in case.run.updated:  # how long its first send took is not known here
            continue
        by = rows.due[row] - latest[message]
        case.accuse("late", number, f"its due time was {by} ms after what was asked for")


def past_ttl(case: Case) -> None:
    """Handled long past its ttl, though nothing delayed its handler."""
    rows, sent = case.handled, case.messages
    ends = (case.latest + sent.ttl)[rows.message] * 1000
    has_ttl = (sent.ttl > 0) & (sent.confirmed > 0)
    over = has_ttl[rows.message] & (case.least > ends + EXPIRES_WITHIN_US)
    for row in _rows(over):
        begin = rows.begin[row]
        if not case.causes.held_up(rows.process[row], ends[row] - SLACK_US, begin):
            case.accuse("late", case.number(row), f"{(begin - ends[row]) / 1e6:.3f} s past its ttl")


# Windows

STARTS_WITHIN_US = 600_000
"""How long a thread may wait between Lisa's check and the handler's first line: processes note
longer ones as stalls."""


def windows(case: Case) -> None:
    """No handler starts outside a window, no deferral counts an attempt, and each ends in time."""
    counts, stats = case.verdicts.counts, case.run.final["stats"].get(WINDOWED, {})
    counts["deferred"] = sum(n for name, n in stats.items() if name.startswith("deferred@"))
    of_topic = case.messages.topic[case.handled.message] == topic_number(WINDOWED)
    for row in _rows(of_topic):
        counts["handlings with a window"] += 1
        _outside_its_window(case, row)
        if case.is_first[row]:
            _first_in_its_window(case, row)


def _outside_its_window(case: Case, row: int) -> None:
    """A handler that could ask Redis's clock began outside, and nothing held it up before that."""
    begin, number = int(case.handled.begin[row]), case.number(row)
    if is_open(number, int(case.least[row])) or is_open(number, begin + CLOCKS_US):
        return
    closed = begin - begin % (MINUTE_MS * 1000)
    around = closed - STARTS_WITHIN_US, closed + STARTS_WITHIN_US
    if begin < around[1] or case.causes.stopped(case.handled.process[row], *around):
        case.verdicts.counts["handlings that were held up as a window closed"] += 1
    else:
        case.accuse("early", number, f"{(begin - closed) / 1e6:.3f} s after its window closed")


def _first_in_its_window(case: Case, row: int) -> None:
    """The due time of a first handling is in time for the window, and its attempt is the first."""
    handling, number = case.handled[row], case.number(row)
    due, latest = int(handling.due), int(case.latest_moved[handling.message])
    if not case.messages.confirmed[handling.message]:
        return
    since = min(latest * 1000, handling.begin) - ACK_US
    if ("message", number) in case.causes.windows or case.causes.around(since, handling.begin):
        return
    if due > opening(number, latest + ACK_US // 1000):
        what = f"its due time was {due - latest} ms after what was asked for, despite its window"
        case.accuse("late", number, what)
    elif due > latest and (due % MINUTE_MS or not is_open(number, due * 1000)):
        case.accuse("late", number, f"its due time {due} is not an opening of its window")


# Keys

SURELY_US = ACK_US // 2
"""How long a lease lasts after its handler began, if nothing held its process up before that."""


def _lanes(case: Case) -> Iterator[NDArray[np.int64]]:
    """The rows of each key's handlings."""
    order = np.argsort(case.lane, kind="stable")
    ends = np.nonzero(np.diff(case.lane[order]))[0] + 1
    for rows in np.split(order, ends):
        if len(rows) and case.lane[rows[0]]:
            yield rows


def keys(case: Case) -> None:
    """Of each key so many are in flight as its topic allows, in their order."""
    rows, leases = case.handled, _leases(case)
    case.verdicts.counts["handlings with a key"] = int((case.lane > 0).sum())
    case.verdicts.counts["leases held to account"] = int(
        (leases[1] > leases[0])[case.lane > 0].sum()
    )
    for lane in _lanes(case):
        topic = TOPICS[case.messages.topic[rows.message[lane[0]]]].name
        _at_once(case, leases, lane, AT_ONCE[topic])
        if topic == ORDERED:
            _overtaken(case, lane)
            _out_of_turn(case, lane, _comes_before)
        elif topic == COALESCED:
            _out_of_turn(case, lane, _is_older)
    of_group = np.nonzero(rows.place // MOST_GROUPS == topic_number(LIMITED))[0]
    _at_once(case, leases, of_group, LANES[LIMITED]["concurrency"])


def _leases(case: Case) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Between which instants each handler certainly ran under a valid lease."""
    rows, causes = case.handled, case.causes
    ends = np.where(rows.end > 0, rows.end_from, np.iinfo(np.int64).max)
    until = np.minimum(ends, rows.begin + SURELY_US)
    until[~causes.undisturbed(rows, rows.begin - ACK_US, rows.begin)] = 0
    until = np.where(causes.accountable(rows) & (rows.end > 0), rows.end_from, until)
    until[np.isin(case.messages.number[rows.message], list(causes.damaged))] = 0
    return rows.begin_by, until


def _at_once(
    case: Case,
    leases: tuple[NDArray[np.int64], NDArray[np.int64]],
    rows: NDArray[np.int64],
    most: int,
) -> None:
    since, until = leases
    held = rows[until[rows] > since[rows]].tolist()
    marks = sorted([(since[row], 1, row) for row in held] + [(until[row], 0, row) for row in held])
    running: dict[int, int] = {}  # several handlings of a message are judged elsewhere
    for _, begins, row in marks:
        if not begins:
            del running[row]
            continue
        running[row] = case.number(row)
        if (found := len(set(running.values()))) > most:
            others = sorted(set(running.values()) - {running[row]})
            what = f"{found} of its lane were in flight at once, instead of {most}: with {others}"
            case.accuse("at once", running[row], what)


def _is_beyond_judgement(case: Case, first: int, second: int, until: int) -> bool:
    """Whether one of two messages was damaged, or the server lost what it knew of them."""
    sent, causes = case.messages, case.causes
    numbers = {int(sent.number[message]) for message in (first, second)}
    tried = int(min(sent.tried[first], sent.tried[second]))
    return bool(numbers & causes.damaged) or causes.first(tried, until, "loss") is not None


def _overtaken(case: Case, lane: NDArray[np.int64]) -> None:
    """No other message of a key begins from when one has begun until it is done or dead."""
    handled = case.handled[lane]
    ends = (handled.verdict == Verdict.OK) | (handled.verdict == Verdict.DISCARDED)
    for message in np.unique(handled.message[ends]):
        own = handled.message == message
        began, done = handled.begin_by[own].min(), handled.end_from[own & ends].min()
        between = ~own & (case.least[lane] > began) & (handled.begin_by < done)
        for row in lane[between]:
            other, begin = int(case.handled.message[row]), int(case.handled.begin[row])
            if _is_beyond_judgement(case, int(message), other, begin):
                continue
            if not case.is_first[row] and case.causes.stopped(
                case.handled.process[row], begin - 3 * ACK_US, begin
            ):
                continue  # its lease was lost before it began again
            what = f"began {(begin - began) / 1e6:.3f} s after {case.messages.number[message]}"
            case.accuse("out of order", case.number(row), f"{what}, which was not done")


Precedes = Callable[[Any, Any, int], NDArray[np.bool_]]
"""Of the messages of a lane, with their due times: which come before one of them."""


def _comes_before(sent: Any, dues: Any, this: int) -> NDArray[np.bool_]:
    """Those with an earlier due time that Redis had then, and those sent before for the same."""
    one, due = sent[this], dues[this]
    is_known = (sent.confirmed > 0) & (sent.confirmed <= due * 1000)
    is_before = (sent.confirmed > 0) & (sent.confirmed < one.tried)
    is_before |= (sent.tried == one.tried) & (sent.confirmed == one.confirmed) & (one.confirmed > 0)
    return np.asarray(
        (dues < due) & is_known | (dues == due) & (sent.number < one.number) & is_before
    )


def _is_older(sent: Any, _dues: Any, this: int) -> NDArray[np.bool_]:
    return np.asarray(sent.number < sent.number[this])


def _out_of_turn(case: Case, lane: NDArray[np.int64], precedes: Precedes) -> None:
    """None begins for the first time after one that it precedes."""
    first = lane[case.is_first[lane] & (case.handled.attempt[lane] == 1)]
    rows = case.handled[first]
    sent, least = case.messages[rows.message], case.least[first]
    for this in range(len(first)):
        after = (least > rows.begin_by[this]) & precedes(sent, rows.due, this)
        for row in first[after]:
            message, begin = int(case.handled.message[row]), int(case.handled.begin[row])
            if _is_beyond_judgement(case, message, int(rows.message[this]), begin):
                continue
            what = f"began {(begin - rows.begin_by[this]) / 1e6:.3f} s after {sent.number[this]}"
            case.accuse("out of order", case.number(row), f"{what}, which comes after it")


# Second calls, and failed ones

HELD_US = SLACK_US
"""A consumer may still begin a message that it held when the message was replaced: one that cannot
start within a second is released, and the group no longer has it."""


def failures(case: Case) -> None:
    """A call may fail only if no server answers, and only because of a fault."""
    for failure in case.run.failures:
        if not _is_of_trouble(failure.name):
            case.accuse("unexplained", failure.number, f"a call failed: {failure.name}")
        elif case.causes.of_failure(failure.process, failure.tried, failure.at) is None:
            after = f"{(failure.at - failure.tried) / 1e6:.3f} s, with nothing in the way"
            what = f"a call failed after {after}: {failure.name}"
            case.accuse("unexplained", failure.number, what)


def _is_of_trouble(name: str) -> bool:
    kind, _, status = name.partition(" ")
    if kind == "Unanswered":
        return int(status or 0) in ANSWERS_OF_TROUBLE
    error = getattr(errors, kind, None)
    return isinstance(error, type) and issubclass(error, errors.ServerUnavailable)


def after_cancel(case: Case) -> None:
    """Handled after a confirmed cancel, or cancelled after it was handled."""
    for message, change, here in case.changes("X", "c"):
        sent = case.messages[message]
        for row in here:
            handling = case.handled[row]
            if case.least[row] > change.ended:
                by = (handling.begin - change.ended) / 1000
                what = f"{by:.3f} ms after its cancel was confirmed"
                excused = case.causes.stopped(handling.process, change.ended, handling.begin)
                if case.causes.loss_of(change.ended):
                    excused = "the server lost the cancel"
                case.accuse("after cancel", sent.number, what, excused=excused)
            elif handling.verdict == Verdict.OK and handling.end < change.tried:
                # Only possible if the lease was lost, or the ack failed.
                number, tried = int(sent.number), change.tried
                if case.causes.of_unsettled(number, sent.do, handling, tried) is None:
                    what = f"handled {(tried - handling.end) / 1000:.3f} ms before its cancel"
                    case.accuse("unexplained", number, f"{what} was confirmed")


def after_replace(case: Case) -> None:
    """Handled after its replacement: only a consumer that held it in flight may begin with it."""
    for kind, answer in (("P", "r"), ("P", "f"), ("U", "r"), ("U", "f"), ("U", "u")):
        is_held = answer == "f"
        held_us, why = (HELD_US, case.causes.held_up) if is_held else (0, case.causes.stopped)
        for message, change, here in case.changes(kind, answer):
            for row in here:
                begin, process = case.handled.begin[row], case.handled.process[row]
                if case.least[row] <= change.ended + held_us:
                    continue
                excused = why(process, change.ended, begin)
                if case.causes.loss_of(change.ended):
                    excused = "the server lost it"
                what = f"{(begin - change.ended) / 1e6:.3f} s after its replacement was confirmed"
                case.accuse("after replace", case.messages.number[message], what, excused=excused)


def answers(case: Case) -> None:
    """An explicit id is accepted once, and known from then on."""
    for row, letter in case.run.odd.items():
        what = f"sent for the first time, and answered {letter!r}"
        case.accuse("unexplained", case.messages.number[row], what)
    told = {"D": "sent again", "P": "sent to replace another", "U": "sent to update another"}
    for kind, what in told.items():
        for message, change, _ in case.changes(kind, "a"):
            if case.owes_its_first(message, change):
                number = case.messages.number[message]
                case.accuse("unexplained", number, f"{what}, and accepted as new")


# Handled again


def again(case: Case) -> None:
    """Every handling after the first must have a cause."""
    for row in _rows(~case.is_first):
        before, after = case.handled[row - 1], case.handled[row]
        number, do = case.number(row), int(case.messages.do[after.message])
        if before.verdict in (Verdict.FAILED, Verdict.DEFERRED):
            cause = _of_retry(case, number, do, before, after)
        else:
            cause = case.causes.of_again(number, do, before, after)
        if cause is None:
            took_s = (after.begin - (before.end or before.begin)) / 1e6
            this, other = (f"process {of.process} (attempt {of.attempt})" for of in (after, before))
            verdict = Verdict(before.verdict).name
            what = f"handled by {this}, {took_s:.3f} s after {other}, {verdict}"
            case.accuse("unexplained", number, what)
        else:
            case.verdicts.again[cause] += 1


def _of_retry(case: Case, number: int, do: int, before: Any, after: Any) -> str | None:
    """The next attempt must follow the pause, unless a sender moved it or there was a fault.

    After a deferral it has the same number.
    """
    due = before.end_from + pause_ms(do) * 1000 - CLOCKS_US
    change = case.run.changes.get(int(after.message))
    if change is not None and change.kind == "R" and change.answer in ("r", ""):
        is_between = before.begin <= (change.ended or after.begin_by)
        if is_between and change.tried <= after.begin_by:
            due = min(due, change.due * 1000)
    has_failed = before.verdict == Verdict.FAILED
    if after.attempt == before.attempt + has_failed and after.begin_by >= due:
        return "the attempt before failed" if has_failed else "it was deferred"
    return case.causes.of_again(number, do, before, after) or case.causes.around(
        before.begin - ACK_US, after.begin
    )


def charged(case: Case) -> None:
    """Each attempt that was counted had begun its handler.

    A process that was killed may have announced one suspect whose handler it did not reach. Pulls
    count when they are read, and so do consumers of an earlier build.
    """
    if any(event.get("earlier") for event in case.run.events):
        return
    counts, kills = case.verdicts.counts, case.causes.consumer_kills
    pulled = topic_number("http")
    for row in _unrecorded(case):
        handling, number = case.handled[row], case.number(row)
        tried = case.messages.tried[handling.message]
        is_damaged = ("message", number) in case.causes.windows
        if handling.place // MOST_GROUPS == pulled or is_damaged:
            continue
        if case.causes.first(tried, handling.begin, "loss"):
            continue
        kill = next((at for at in kills if tried <= at <= handling.begin_by), None)
        if kill is None:
            what = f"attempt {handling.attempt}, but no handler began the one before"
            case.accuse("unexplained", number, what)
        else:
            kills.remove(kill)
            counts["attempts counted at a kill before a handler's first line"] += 1


def _unrecorded(case: Case) -> list[int]:
    """For each attempt that is missing, the first handling after it, in order of time."""
    rows = case.handled
    order = np.lexsort((rows.begin, rows.attempt, rows.place, rows.message))
    message, place, attempt = (
        rows[name][order].astype(int) for name in ("message", "place", "attempt")
    )
    before = np.append(0, attempt)[:-1]
    before[np.diff(message, prepend=-1).astype(bool) | np.diff(place, prepend=-1).astype(bool)] = 0
    found: list[int] = np.repeat(order, np.maximum(attempt - before - 1, 0)).tolist()
    return sorted(found, key=lambda row: rows.begin[row])


def astray(case: Case) -> None:
    """Handled as a message of another topic, or sent by nobody."""
    topics, places = case.messages.topic[case.handled.message], case.handled.place // MOST_GROUPS
    for row in _rows(topics != places):
        what = f"sent to {TOPICS[topics[row]].name}, and handled in {TOPICS[places[row]].name}"
        case.accuse("unexplained", case.number(row), what)
    for number in case.run.strangers:
        case.accuse("unexplained", number, "handled, but sent by nobody")


# The final state

NEEDS = {Do.DISCARD: (Verdict.DISCARDED, 1), Do.POISON: (Verdict.FAILED, 1 + POISON_RETRIES)}
"""The verdict, and the number of attempts, required of messages in garbage."""


def left(case: Case) -> None:
    """Live messages at the end must be in garbage, for a reason."""
    final = case.run.final
    for live in final["live"]:
        number, where = live["number"], f"{live['topic']}/{live['group']}"
        row = case.row(number)
        if live["state"] != "garbage":
            case.accuse("stuck", number, f"{live['state']} in {where}, {live['id']}")
        elif row is None or case.messages.do[row] not in NEEDS:
            case.accuse("unexplained", number, f"in garbage of {where}: {live['reason']}")
        else:
            _deserves_garbage(case, row, where)
    named = {live["number"] for live in final["live"] if live["number"]}
    if final["bodies"] != len(named):
        case.accuse("unexplained", 0, f"{final['bodies']} bodies, {len(named)} live messages")
    for finding in final["findings"]:
        case.accuse("unexplained", 0, "fsck: {kind} {topic} {id} {what}".format(**finding))


def _deserves_garbage(case: Case, message: int, where: str) -> None:
    """Its handler must have given up, or a fault must have used up its attempts."""
    sent, here = case.messages[message], case.handlings(message)
    rows, do = case.handled[here.start : here.stop], Do(sent.do)
    verdict, least = NEEDS[do]
    found = len(np.unique(rows.attempt[rows.verdict == verdict]))
    since = sent.due * 1000
    until = max([since, *rows.begin]) + SETTLES_US
    # A handler notes that it gives up before any other process can know of it.
    is_excused = do is Do.POISON and case.causes.around(since - ACK_US, until)
    if found < least and not is_excused:
        what = f"{do.name} in garbage of {where} after {found} of {least} attempts"
        case.accuse("unexplained", sent.number, what)


LATE_MS = 30_000
"""A schedule that is further behind than this at the end has stopped."""


def ticks(case: Case) -> None:
    """Each tick has one message, by the schedule itself, whatever happened to its managers."""
    final = case.run.final.get("ticks")
    if final is None:  # a run that restores messages: schedules are not in the archive
        return
    # Roles of an earlier build know no schedules.
    rolls = (event["until"] for event in case.run.events if event.get("kind") == "roll")
    owed_from_ms = max(rolls, default=0) // 1000
    created, loss = 0, "the server lost data" if case.causes.windows["loss"] else None
    for name, schedule in final["schedules"].items():
        found = set(schedule["found"])
        expected = {tick for tick in schedule["expected"] if tick >= owed_from_ms or tick in found}
        created += len(found)
        case.verdicts.counts["ticks"] += len(expected)
        for tick in sorted(expected - found):
            case.accuse("lost", 0, f"schedule {name}: the tick {tick} has no message", excused=loss)
        for tick in sorted(found - expected):
            case.accuse("unexplained", 0, f"schedule {name}: {tick} is not a tick of it")
        if schedule["version"] != 1:
            case.accuse("unexplained", 0, f"schedule {name} has version {schedule['version']}")
        if schedule["behind_ms"] is None or schedule["behind_ms"] > LATE_MS:
            case.accuse("stuck", 0, f"schedule {name} is {schedule['behind_ms']} ms behind")
    if final["sent"] != created and not loss:
        case.accuse("unexplained", 0, f"{final['sent']} sent by schedules, {created} are there")
    for finding in final["findings"]:
        case.accuse("unexplained", 0, f"fsck of {TICKS}: {finding}")


# Repairs, processes, logs and memory


def repairs(case: Case) -> None:
    """Findings of `fsck --repair` must be damage done by the run: any other, Lisa did itself."""
    events = [event for event in case.run.events if "skipped" not in event]
    damages = [event for event in events if event.get("kind") in FOREIGN]
    for repair in events:
        began = repair.get("repairing", repair.get("until", repair["at"]))
        for topic, found in repair.get("repaired", {}).items():
            allowed = {
                kind
                for damage in damages
                if _may_stand(case, damage, topic, began, repair["at"])
                for kind in FOREIGN[damage["kind"]]
            }
            for kind in found.keys() - allowed:
                words = [
                    word for word in repair.get("found", {}).get(topic, []) if word.startswith(kind)
                ]
                what = f"fsck in the run: {found[kind]} {kind} in {topic} {'; '.join(words)}"
                case.accuse("unexplained", 0, what.rstrip())


def _may_stand(case: Case, damage: dict[str, Any], topic: str, began: int, ended: int) -> bool:
    """Whether a damage existed then: done, and not repaired (or its repair was lost)."""
    if damage["target"].partition("/")[0] != topic or damage["since"] > ended:
        return False
    was_repaired = "repaired" in damage and damage["until"] < began
    return not was_repaired or case.causes.loss_of(damage["until"]) is not None


STARTS_WITHIN_S = 10
"""A process told to end before it handles signals is ended by the signal."""


def processes(case: Case) -> None:
    """No role may end before SIGTERM, and then only with exit code 0, nor log an error."""
    for event in case.run.events:
        if event["event"] != "end" or event["how"] == "killed":
            continue
        if event["role"].startswith("archive"):
            continue  # it ends with a server, and reports gaps by its exit code
        if event["code"] == -signal.SIGKILL and event["number"] in case.causes.kills:
            continue  # another fault killed it at the same time
        was_asleep = event["code"] == -signal.SIGTERM and event["age_s"] < STARTS_WITHIN_S
        if event["how"] == "by itself" or (event["code"] and not was_asleep):
            what = f"{event['role']} ended {event['how']} with code {event['code']}"
            case.accuse("unexplained", 0, what)
    for trace in case.run.traces:
        case.accuse("unexplained", 0, trace)


JUDGED_FROM_S = 600.0
"""In a shorter run the second half is not yet steady."""

GROWS_BY = 0.2
GROWS_MB, GROWS_KEYS = 16.0, 5_000.0
"""How much, and by what share of its mean, a series may rise in the second half of a run."""


def flatness(run: Run) -> dict[str, dict[str, float]]:
    """Each series over the second half of a run, from the first message to the last.

    `growth` is the rise of a fitted line, as a share of its mean.
    """
    instants = {event["event"]: event["at"] for event in run.events}
    since, until = instants.get("load", 0), instants.get("sent", 0)
    samples = [sample for sample in run.samples if since <= sample["at"] <= until]
    series: dict[str, list[tuple[float, float]]] = {}
    for sample in samples[len(samples) // 2 :]:
        for name, value in sample["found"].items():
            series.setdefault(name, []).append((sample["at"] / 1e6, value))
    found = {}
    for name, points in series.items():
        at, values = np.array(points).T
        mean, rises = values.mean(), 0.0
        if len(points) > 2 and mean:
            rises = np.polyfit(at - at[0], values, 1)[0] * (at[-1] - at[0]) / mean
        half = {"least": values.min(), "mean": mean, "most": values.max(), "growth": rises}
        found[name] = {name: float(value) for name, value in half.items()}
    return found


def growth(case: Case) -> None:
    """In a long run the server's memory and keys, and each role's memory, must not grow."""
    instants = {event["event"]: event["at"] for event in case.run.events}
    if instants.get("sent", 0) - instants.get("load", 0) < JUDGED_FROM_S * 1e6:
        return
    for name, half in flatness(case.run).items():
        mean, most = half["mean"], GROWS_KEYS if name == "keys" else GROWS_MB
        rises, is_judged = half["growth"] * mean, name == "keys" or name.endswith("MB")
        if is_judged and rises > GROWS_BY * mean + most:
            what = f"growth: {name} rose by {rises:,.1f} in the second half, to {half['most']:,.1f}"
            case.accuse("unexplained", 0, what)


JUDGES = (
    count, lost, again, charged, astray, left, processes, early, late, late_by_its_due_time,
    past_ttl, failures, after_cancel, after_replace, answers, repairs, growth, ticks, windows,
    keys,
)  # fmt: skip
