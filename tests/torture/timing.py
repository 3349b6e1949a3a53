"""Judges of time: handled before it was due, late without a fault, or past its ttl."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.torture.causes import ACK_US, SLACK_US, meet
from tests.torture.world import WINDOWED, topic_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.torture.case import Case

LATE_US = ACK_US
"""Without a fault, the latest time after due for the first handling of a message."""

TRIES_US = 5_000_000
"""By then a call has ended, with success or failure."""

EXPIRES_WITHIN_US = 1_000_000
"""How long a message opened within its ttl may wait for a handler before it is released."""


def early(case: Case) -> None:
    """Handled before it was due, by the message's due time or by its sender's."""
    rows = case.handled
    for row in np.nonzero(rows["begin"] < rows["due"] * 1000)[0]:
        by = (rows["due"][row] * 1000 - rows["begin"][row]) / 1000
        _accuse_early(case, int(row), f"{by:.3f} ms before its due time")
    due = _earliest(case)
    promised = due[rows["message"]]
    for row in np.nonzero((rows["attempt"] == 1) & (rows["due"] < promised))[0]:
        by = promised[row] - rows["due"][row]
        _accuse_early(case, int(row), f"its due time was {by} ms before what was asked for")
    _early_after_move(case, due)


def _earliest(case: Case) -> NDArray[np.int64]:
    """By message, in ms: the earliest due time requested."""
    due: NDArray[np.int64] = case.messages["due"].copy()
    for message, change in case.run.messages.changes.items():
        # A repeat has no effect, unless the first send never arrived.
        says_when = change.kind == "D" and not case.owes_its_first(message, change)
        if says_when or change.kind == "R":
            due[message] = min(due[message], change.due)
    return due


def _early_after_move(case: Case, least: NDArray[np.int64]) -> None:
    rows = case.handled
    for message, change, here in case.changes("R", "r"):
        if change.due <= least[message] or case.causes.loss_of(change.ended):
            continue
        for row in here:
            # Otherwise it is uncertain: an attempt whose reply was lost may have moved it before.
            is_after = rows["attempt"][row] == 1 and rows["begin"][row] > change.ended
            if is_after and rows["due"][row] < change.due:
                by = change.due - rows["due"][row]
                _accuse_early(case, row, f"{by} ms before its new due time")


def _accuse_early(case: Case, row: int, what: str) -> None:
    attempt = case.handled["attempt"][row]
    case.verdicts.accuse("early", case.number(row), f"{what}, attempt {attempt}")


def late(case: Case) -> None:
    """First handled long after it was due, without a fault."""
    rows, causes = case.handled, case.causes
    due = np.maximum(rows["due"] * 1000, case.messages["tried"][rows["message"]])
    begin = case.least
    found = case.is_first & (rows["attempt"] == 1) & (begin - due > LATE_US)
    stalls = [one for windows in causes.stalls.values() for one in windows]
    found[found] = ~meet([*causes.every, *causes.losses, *stalls], due[found], begin[found])
    for row in np.nonzero(found)[0]:
        message = case.messages[rows["message"][row]]
        tried, confirmed = int(message["tried"]), int(message["confirmed"])
        if any(one.meets(tried, confirmed or tried + TRIES_US) for one in causes.losses):
            continue  # the server lost it, and an archive restored it
        by = (begin[row] - due[row]) / 1e6
        case.verdicts.accuse("late", case.number(int(row)), f"{by:.3f} s, with nothing in the way")


def late_by_its_due_time(case: Case) -> None:
    """Due later than its sender requested.

    Not after a repair or a loss, when a message is due immediately. A repeated send may have been
    the first to arrive. Messages with windows have a judge of their own.
    """
    rows, causes, changes = case.handled, case.causes, case.run.messages.changes
    latest = case.latest_due()
    confirmed = case.messages["confirmed"] > 0
    asked = case.is_first & (rows["attempt"] == 1) & confirmed[rows["message"]]
    asked &= case.messages["topic"][rows["message"]] != topic_number(WINDOWED)
    for row in np.nonzero(asked & (rows["due"] > latest[rows["message"]]))[0]:
        message, begin = int(rows["message"][row]), int(rows["begin"][row])
        change, number = changes.get(message), case.number(int(row))
        if change is not None and change.kind == "R" and change.answer != "r":
            continue
        if change is not None and change.kind == "D" and not case.owes_its_first(message, change):
            continue
        tried = int(case.messages["tried"][message])
        if number in causes.named or any(one.meets(tried, begin) for one in causes.losses):
            continue
        by = rows["due"][row] - latest[message]
        what = f"its due time was {by} ms after what was asked for"
        case.verdicts.accuse("late", number, what)


def past_ttl(case: Case) -> None:
    """Handled long past its ttl, though nothing delayed its handler."""
    rows, causes = case.handled, case.causes
    ends = (case.latest + case.messages["ttl"])[rows["message"]] * 1000
    has_one = (case.messages["ttl"] > 0) & (case.messages["confirmed"] > 0)
    over = has_one[rows["message"]] & (case.least > ends + EXPIRES_WITHIN_US)
    for row in np.nonzero(over)[0]:
        begin, process = int(rows["begin"][row]), int(rows["process"][row])
        if causes.held_up(process, int(ends[row]) - SLACK_US, begin):
            continue
        by = (begin - int(ends[row])) / 1e6
        case.verdicts.accuse("late", case.number(int(row)), f"{by:.3f} s past its ttl")
