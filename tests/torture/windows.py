"""Judges messages with windows: outside them no handler starts; see `tests.torture.minutes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.torture.case import CLOCKS_US
from tests.torture.causes import ACK_US
from tests.torture.minutes import is_open, opening
from tests.torture.world import MINUTE_MS, WINDOWED, topic_number

if TYPE_CHECKING:
    from tests.torture.case import Case

STARTS_WITHIN_US = 600_000
"""How long a thread may wait between Lisa's check and the handler's first line: processes note
longer ones as stalls."""


def judge(case: Case) -> None:
    """No handler starts outside a window, no deferral counts an attempt, and each ends in time."""
    deferred = case.run.final["stats"].get(WINDOWED, {})
    case.verdicts.counts["deferred"] = sum(
        n for name, n in deferred.items() if name.startswith("deferred@")
    )
    latest = case.latest_due()
    of_topic = case.messages["topic"][case.handled["message"]] == topic_number(WINDOWED)
    for row in map(int, np.nonzero(of_topic)[0]):
        case.verdicts.counts["handlings with a window"] += 1
        _outside(case, row)
        if case.is_first[row]:
            _first(case, row, int(latest[case.handled["message"][row]]))


def _outside(case: Case, row: int) -> None:
    """A handler that could ask Redis's clock began outside, and nothing held it up before that."""
    begin, number = int(case.handled["begin"][row]), case.number(row)
    if is_open(number, int(case.least[row])) or is_open(number, begin + CLOCKS_US):
        return
    closed = begin // 1000 // MINUTE_MS * MINUTE_MS * 1000
    process = int(case.handled["process"][row])
    around = closed - STARTS_WITHIN_US, closed + STARTS_WITHIN_US
    if begin < around[1] or case.causes.stopped(process, *around):
        case.verdicts.counts["handlings that were held up as a window closed"] += 1
        return
    what = f"{(begin - closed) / 1e6:.3f} s after its window closed"
    case.verdicts.accuse("early", number, what)


def _first(case: Case, row: int, latest: int) -> None:
    """The due time of a first handling is in time for the window, and its attempt is the first."""
    one, number = case.handled[row], case.number(row)
    message, due, begin = int(one["message"]), int(one["due"]), int(one["begin"])
    if not case.messages["confirmed"][message] or number in case.causes.named:
        return
    if case.causes.around(min(latest * 1000, begin) - ACK_US, begin):
        return
    if one["attempt"] > 1:
        case.verdicts.accuse("unexplained", number, f"attempt {one['attempt']} is its first")
    elif due > opening(number, latest + ACK_US // 1000):
        what = f"its due time was {due - latest} ms after what was asked for, despite its window"
        case.verdicts.accuse("late", number, what)
    elif due > latest and (due % MINUTE_MS or not is_open(number, due * 1000)):
        case.verdicts.accuse("late", number, f"its due time {due} is not an opening of its window")
