"""Who was lost, early, handled after a cancel, stuck, or handled again without a reason.

It reads what a run left in files: the ledgers, what the stage did, and the final state. It never
asks Redis.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.torture.causes import Causes, Hold
from tests.torture.reading import TakenBack
from tests.torture.world import MOST_GROUPS, TOPICS, Do, Verdict, place_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.torture.reading import Run

__all__ = ["FAULTS", "Finding", "Verdicts", "check"]

FAULTS = ("lost", "early", "after cancel", "stuck", "unexplained")
STARTS_WITHIN_S = 10
"""A process that is told to end before it listens to signals ends by the signal."""

NEAR_MS, FEW = 1_000, 10
"""So many messages that were due within so long of another one tell whether all was well then."""

UNSURE_US = 500_000
"""So far may be off what a process says of an instant when it could not ask Redis."""
ENDS_IN_GARBAGE = (Do.DISCARD, Do.POISON)


class Finding(NamedTuple):
    """One message (0: none in particular), and what is the matter with it."""

    number: int
    what: str


@dataclass
class Verdicts:
    """`guilty` is empty after a clean run; `excused` has what a fault explains, each by name."""

    guilty: dict[str, list[Finding]] = field(default_factory=lambda: {one: [] for one in FAULTS})
    excused: dict[str, list[Finding]] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not any(self.guilty.values())

    def accuse(self, fault: str, number: int, what: str) -> None:
        self.guilty[fault].append(Finding(number, what))

    def excuse(self, fault: str, number: int, what: str) -> None:
        self.excused.setdefault(fault, []).append(Finding(number, what))


def check(run: Run) -> Verdicts:
    """Judge a run."""
    judge = _Judge(run)
    for step in (judge.count, judge.lost, judge.expired, judge.early, judge.after_cancel,
                 judge.again, judge.left, judge.processes):  # fmt: skip
        step()
    return judge.verdicts


class _Judge:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._messages = run.messages.rows
        self._handled = run.handled.rows
        self._causes = Causes.of(run.events, run.stalls)
        self.verdicts = Verdicts()
        self._garbage = {
            (row["number"], place_number(row["topic"], row["group"]))
            for row in run.final["live"] if row["state"] == "garbage"
        }  # fmt: skip
        self._done = self._settled()

    def _settled(self) -> NDArray[np.bool_]:
        """By message and group: handled with success, or in garbage."""
        done = np.zeros((len(self._messages), MOST_GROUPS), bool)
        well = self._handled[self._handled["verdict"] == Verdict.OK]
        done[well["message"], well["place"] % MOST_GROUPS] = True
        for number, place in self._garbage:
            row = self._run.messages.row(number)
            if row is not None:
                done[row, place % MOST_GROUPS] = True
        return done

    def count(self) -> None:
        """How much there was of everything."""
        rows, counts = self._messages, self.verdicts.counts
        counts["attempted"] = len(rows)
        counts["confirmed"] = int((rows["confirmed"] > 0).sum())
        counts["cancelled"] = int((rows["cancelled"] > 0).sum())
        counts["moved"] = sum(1 for one in self._run.messages.moves.values() if one.confirmed)
        counts["replaced"] = int((rows["taken_back"] == TakenBack.REPLACED).sum())
        counts["handlings"] = len(self._handled)
        for verdict in Verdict:
            n = int((self._handled["verdict"] == verdict).sum())
            counts[f"handlings: {verdict.name.lower()}"] = n
        counts["garbage"] = len(self._garbage)

    def _owed(self) -> NDArray[np.bool_]:
        """By message and group: confirmed, and neither done with nor taken back."""
        rows = self._messages
        owed = (rows["confirmed"] > 0) & (rows["taken_back"] == 0)
        groups = np.array([len(topic.groups) for topic in TOPICS])[rows["topic"]]
        every = owed[:, None] & (np.arange(MOST_GROUPS)[None, :] < groups[:, None])
        return np.asarray(every & ~self._done)

    def lost(self) -> None:
        """Confirmed, yet handled by nobody, and not in garbage."""
        live = {(row["number"], row["group"]) for row in self._run.final["live"]}
        for row, group in zip(*np.nonzero(self._owed()), strict=True):
            message = self._messages[row]
            if message["ttl"]:
                self._let_expire(int(row))
                continue
            number, topic = self._run.messages.number(int(row)), TOPICS[message["topic"]]
            if (number, topic.groups[group]) in live or (number, None) in live:
                continue  # stuck, and told so there
            what = f"{topic.name}/{topic.groups[group]}, {Do(message['do']).name}"
            loss = self._causes.loss_of(int(message["confirmed"]))
            if number in self._causes.deleted:
                self.verdicts.excuse("lost", number, f"{what}: a foreign hand deleted its body")
            elif loss is not None and number in self._run.archived:
                self.verdicts.accuse("lost", number, f"{what}: archived, yet not restored")
            elif loss is not None:
                before_s = (loss.until - int(message["confirmed"])) / 1e6
                self.verdicts.excuse(
                    "lost", number, f"{what}: confirmed {before_s:.3f} s before the server's kill"
                )
            else:
                self.verdicts.accuse("lost", number, what)

    def _let_expire(self, row: int) -> None:
        """A ttl is no excuse where nothing was wrong and others, due with it, came in time."""
        self.verdicts.counts["expired"] += 1
        due, ttl = int(self._messages["due"][row]), int(self._messages["ttl"][row])
        around = (due - NEAR_MS) * 1000, (due + ttl + NEAR_MS) * 1000
        if any(one.meets(*around) for one in self._causes.every):
            return
        topic = self._messages["topic"][self._handled["message"]]
        beside = self._handled[
            (topic == self._messages["topic"][row]) & (self._handled["attempt"] == 1)
            & (abs(self._handled["due"] - due) < NEAR_MS)
        ]  # fmt: skip
        late = beside["begin"] // 1000 - beside["due"]
        if len(late) >= FEW and late.max() < ttl / 10:
            what = f"let expire, though {len(late)} due with it were handled in {late.max()} ms"
            self.verdicts.accuse("lost", self._run.messages.number(row), what)

    def expired(self) -> None:
        """Messages with a short ttl that nobody handled: so many at least must have expired."""
        stats = self._run.final["stats"].values()
        told = sum(one.get("expired", 0) for one in stats)
        unhandled = self.verdicts.counts["expired"]
        if unhandled > told and not self._causes.losses:
            self.verdicts.accuse("lost", 0, f"{unhandled} with a ttl unhandled, {told} expired")

    def early(self) -> None:
        """Handed over before it was due, by the message's own word or by its sender's."""
        rows = self._handled
        for row in np.nonzero(rows["begin"] < rows["due"] * 1000)[0]:
            by = (rows["due"][row] * 1000 - rows["begin"][row]) / 1000
            self._accuse_early(int(row), f"{by:.3f} ms before its due time")
        promised = self._messages["due"][rows["message"]]
        for row in np.nonzero((rows["attempt"] == 1) & (rows["due"] < promised))[0]:
            if int(rows["message"][row]) not in self._run.messages.moves:
                by = promised[row] - rows["due"][row]
                self._accuse_early(int(row), f"its due time was {by} ms before what was asked for")
        self._early_after_move()

    def _early_after_move(self) -> None:
        rows = self._handled
        for message, move in self._run.messages.moves.items():
            here = slice(*np.searchsorted(rows["message"], [message, message + 1]))
            before = int(self._messages["due"][message])
            holds = move.confirmed and self._causes.loss_of(move.confirmed) is None
            for row in range(here.start, here.stop):
                if rows["attempt"][row] > 1:
                    continue
                is_sure = holds and rows["begin"][row] > move.confirmed
                least = move.due if is_sure else min(move.due, before)
                if rows["due"][row] < least:
                    by = least - rows["due"][row]
                    self._accuse_early(row, f"{by} ms before its new due time")

    def _accuse_early(self, row: int, what: str) -> None:
        number = self._run.messages.number(int(self._handled["message"][row]))
        self.verdicts.accuse("early", number, f"{what}, attempt {self._handled['attempt'][row]}")

    def after_cancel(self) -> None:
        """Handled, though Redis had confirmed that it never would be."""
        rows = self._handled
        cancelled = self._messages["cancelled"][rows["message"]]
        least = np.where(rows["asked"] == 1, rows["begin"], rows["begin"] - UNSURE_US)
        for row in np.nonzero((cancelled > 0) & (least > cancelled))[0]:
            number = self._run.messages.number(int(rows["message"][row]))
            at, begin = int(cancelled[row]), int(rows["begin"][row])
            what = f"{(begin - at) / 1000:.3f} ms after its cancel was confirmed"
            stopped = self._causes.stopped(int(rows["process"][row]), at, begin)
            if self._causes.loss_of(at):
                self.verdicts.excuse("after cancel", number, f"{what}: the server lost the cancel")
            elif stopped:
                self.verdicts.excuse("after cancel", number, f"{what}: its handler's {stopped}")
            else:
                self.verdicts.accuse("after cancel", number, what)

    def again(self) -> None:
        """Every handling after the first has a cause."""
        for row in self._seconds():
            before, again = self._hold(row - 1), self._hold(row)
            message, place = int(self._handled["message"][row]), int(self._handled["place"][row])
            number, do = self._run.messages.number(message), int(self._messages["do"][message])
            cause = self._causes.of_again(number, place, do, before, again)
            if cause is None:
                self.verdicts.accuse(
                    "unexplained", number,
                    f"handled by process {again.process} (attempt {again.attempt}), "
                    f"{(again.begin - before.last) / 1e6:.3f} s after process {before.process} "
                    f"(attempt {before.attempt}, {Verdict(before.verdict).name})",
                )  # fmt: skip
            else:
                self.verdicts.again[cause] += 1

    def _seconds(self) -> Iterator[int]:
        rows = self._handled
        same = (rows["message"][1:] == rows["message"][:-1]) & (
            rows["place"][1:] == rows["place"][:-1]
        )
        yield from (int(row) + 1 for row in np.nonzero(same)[0])

    def _hold(self, row: int) -> Hold:
        one = self._handled[row]
        return Hold(int(one["process"]), int(one["begin"]), int(one["end"]), int(one["verdict"]),
                    int(one["attempt"]))  # fmt: skip

    def left(self) -> None:
        """What is live at the end must be in garbage, and belong there."""
        for row in self._run.final["live"]:
            where = f"{row['topic']}/{row['group']}"
            if row["state"] != "garbage":
                self.verdicts.accuse(
                    "stuck", row["number"], f"{row['state']} in {where}, {row['id']}"
                )
                continue
            known = self._run.messages.row(row["number"])
            do = None if known is None else Do(self._messages["do"][known])
            if do not in ENDS_IN_GARBAGE:
                self.verdicts.accuse(
                    "unexplained", row["number"], f"in garbage of {where}: {row['reason']}"
                )
        bodies = self._run.final["bodies"]
        named = {one["number"] for one in self._run.final["live"] if one["number"]}
        if bodies != len(named):
            self.verdicts.accuse("unexplained", 0, f"{bodies} bodies, {len(named)} live messages")
        for number in self._run.handled.strangers:
            self.verdicts.accuse("unexplained", number, "handled, but sent by nobody")
        for one in self._run.final["findings"]:
            self.verdicts.accuse("unexplained", 0, "fsck: {kind} {topic} {id} {what}".format(**one))

    def processes(self) -> None:
        """No role ends unless it is told to, and then with exit code 0."""
        for event in self._run.events:
            if event["event"] != "end" or event["how"] == "killed":
                continue
            if event["role"].startswith("archive"):
                continue  # it ends with a server, and tells of gaps by its exit code
            was_asleep = event["code"] == -signal.SIGTERM and event["age_s"] < STARTS_WITHIN_S
            if event["how"] == "by itself" or (event["code"] and not was_asleep):
                what = f"{event['role']} ended {event['how']} with code {event['code']}"
                self.verdicts.accuse("unexplained", 0, what)
