"""Judges of calls: failed ones, and ones with a false answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.model import errors
from tests.torture.causes import SLACK_US
from tests.torture.world import ANSWERS_OF_TROUBLE, Verdict

if TYPE_CHECKING:
    from tests.torture.case import Case

HELD_US = SLACK_US
"""A consumer may still begin a message that it held when the message was replaced: one that cannot
start within a second is released, and the group no longer has it."""


def failures(case: Case) -> None:
    """A call may fail only if no server answers, and only because of a fault."""
    for one in case.run.messages.failures:
        if not _is_of_trouble(one.name):
            what = f"a call failed: {one.name}"
        elif case.causes.of_failure(one.process, one.tried, one.at) is None:
            took = (one.at - one.tried) / 1e6
            what = f"a call failed after {took:.3f} s, with nothing in the way: {one.name}"
        else:
            continue
        case.verdicts.accuse("unexplained", one.number, what)


def _is_of_trouble(name: str) -> bool:
    kind, _, status = name.partition(" ")
    if kind == "Unanswered":
        return int(status or 0) in ANSWERS_OF_TROUBLE
    error = getattr(errors, kind, None)
    return isinstance(error, type) and issubclass(error, errors.ServerUnavailable)


def after_cancel(case: Case) -> None:
    """Handled after a confirmed cancel, or cancelled after it was handled."""
    for message, change, here in case.changes("X", "c"):
        for row in here:
            if case.least[row] > change.ended:
                _begun_after_cancel(case, row, change.ended)
            else:
                _handled_before_cancel(case, row, message, change.tried)


def _begun_after_cancel(case: Case, row: int, at: int) -> None:
    begin, number = int(case.handled["begin"][row]), case.number(row)
    what = f"{(begin - at) / 1000:.3f} ms after its cancel was confirmed"
    stopped = case.causes.stopped(int(case.handled["process"][row]), at, begin)
    if case.causes.loss_of(at):
        case.verdicts.excuse("after cancel", number, f"{what}: the server lost the cancel")
    elif stopped:
        case.verdicts.excuse("after cancel", number, f"{what}: its handler's {stopped}")
    else:
        case.verdicts.accuse("after cancel", number, what)


def _handled_before_cancel(case: Case, row: int, message: int, tried: int) -> None:
    """Handled before a confirmed cancel: only possible if its lease was lost or its ack failed."""
    hold = case.hold(row)
    if hold.verdict != Verdict.OK or hold.end >= tried:
        return
    number, place = case.number(row), int(case.handled["place"][row])
    do = int(case.messages["do"][message])
    if case.causes.of_unsettled(number, place, do, hold, tried) is None:
        by = (tried - hold.end) / 1000
        what = f"cancelled, by the answer, though it had been handled {by:.3f} ms before"
        case.verdicts.accuse("unexplained", number, what)


def after_replace(case: Case) -> None:
    """Handled after its replacement: a consumer may only finish what it already had."""
    for _, change, here in case.changes("P", "r"):
        for row in here:
            begin, process = int(case.handled["begin"][row]), int(case.handled["process"][row])
            if case.least[row] <= change.ended + HELD_US:
                continue
            number = case.number(row)
            what = f"{(begin - change.ended) / 1e6:.3f} s after its replacement was confirmed"
            stopped = case.causes.held_up(process, change.ended, begin)
            if case.causes.loss_of(change.ended):
                case.verdicts.excuse("after replace", number, f"{what}: the server lost it")
            elif stopped:
                case.verdicts.excuse("after replace", number, f"{what}: its handler's {stopped}")
            else:
                case.verdicts.accuse("after replace", number, what)


def answers(case: Case) -> None:
    """An explicit id is accepted once, and known from then on."""
    for row, letter in case.run.messages.odd.items():
        what = f"sent for the first time, and answered {letter!r}"
        case.verdicts.accuse("unexplained", case.run.messages.number(row), what)
    for kind, what in (("D", "sent again"), ("P", "sent to replace another")):
        for message, change, _ in case.changes(kind, "a"):
            if case.owes_its_first(message, change):
                number = case.run.messages.number(message)
                case.verdicts.accuse("unexplained", number, f"{what}, and accepted as new")
