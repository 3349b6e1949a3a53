"""Finds messages lost, early, late, stuck, or handled after a cancel or again without a reason.

It reads a run's files: the ledgers, the stage's events, and the final state. It never asks Redis.
Judges of a single rule are in modules of their own.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import numpy as np

from tests.torture import calls, ticking, timing, windows
from tests.torture.case import CLOCKS_US, Case
from tests.torture.causes import ACK_US, SETTLES_US, Hold
from tests.torture.repairs import repairs
from tests.torture.samples import growth
from tests.torture.sent import TakenBack
from tests.torture.verdicts import Verdicts
from tests.torture.world import (
    MOST_GROUPS,
    POISON_RETRIES,
    TOPICS,
    Do,
    Verdict,
    pause_ms,
    place_number,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.torture.reading import Run

STARTS_WITHIN_S = 10
"""A process told to end before it handles signals is ended by the signal."""

NEAR_MS, FEW = 1_000, 10
"""This many messages due this close to another one show whether all was well then."""

ENDS_IN_GARBAGE = (Do.DISCARD, Do.POISON)
NEEDS = {Do.DISCARD: (Verdict.DISCARDED, 1), Do.POISON: (Verdict.FAILED, 1 + POISON_RETRIES)}
"""The verdict, and the number of attempts, required of messages in garbage."""


def check(run: Run) -> Verdicts:
    """Judge a run."""
    case = Case(run)
    judge = _Judge(case)
    for step in (
        judge.count,
        judge.lost,
        judge.expired,
        judge.again,
        judge.astray,
        judge.left,
        judge.processes,
        judge.logs,
    ):
        step()
    for alone in (
        timing.early,
        timing.late,
        timing.late_by_its_due_time,
        timing.past_ttl,
        calls.failures,
        calls.after_cancel,
        calls.after_replace,
        calls.answers,
        repairs,
        growth,
        ticking.judge,
        windows.judge,
    ):
        alone(case)
    return case.verdicts


class _Judge:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._run = case.run
        self._messages = case.messages
        self._handled = case.handled
        self._causes = case.causes
        self.verdicts = case.verdicts
        self._garbage = {
            (row["number"], place_number(row["topic"], row["group"]))
            for row in self._run.final["live"]
            if row["state"] == "garbage"
        }
        self._done = self._settled()

    def _settled(self) -> NDArray[np.bool_]:
        """By message and group: handled successfully, or in garbage."""
        done = np.zeros((len(self._messages), MOST_GROUPS), bool)
        well = self._handled[self._handled["verdict"] == Verdict.OK]
        done[well["message"], well["place"] % MOST_GROUPS] = True
        for number, place in self._garbage:
            row = self._run.messages.row(number)
            if row is not None:
                done[row, place % MOST_GROUPS] = True
        return done

    def count(self) -> None:
        """Count everything."""
        rows, counts = self._messages, self.verdicts.counts
        counts["attempted"] = len(rows)
        counts["confirmed"] = int((rows["confirmed"] > 0).sum())
        counts["cancelled"] = int((rows["taken_back"] == TakenBack.CANCELLED).sum())
        counts["moved"] = sum(1 for _ in self._case.changes("R", "r"))
        counts["replaced"] = int((rows["taken_back"] == TakenBack.REPLACED).sum())
        counts["handlings"] = len(self._handled)
        accountable = self._causes.accountable(self._handled)
        counts["handlings held to account"] = int(accountable.sum())
        for verdict in Verdict:
            n = int((self._handled["verdict"] == verdict).sum())
            counts[f"handlings: {verdict.name.lower()}"] = n
        counts["garbage"] = len(self._garbage)

    def _owed(self) -> NDArray[np.bool_]:
        """By message and group: confirmed, and neither settled nor taken back."""
        rows = self._messages
        owed = (rows["confirmed"] > 0) & (rows["taken_back"] == 0)
        groups = np.array([len(topic.groups) for topic in TOPICS])[rows["topic"]]
        every = owed[:, None] & (np.arange(MOST_GROUPS)[None, :] < groups[:, None])
        return np.asarray(every & ~self._done)

    def lost(self) -> None:
        """Confirmed, but never handled, and not in garbage."""
        live = {(row["number"], row["group"]) for row in self._run.final["live"]}
        for row, group in zip(*np.nonzero(self._owed()), strict=True):
            message = self._messages[row]
            number, topic = self._run.messages.number(int(row)), TOPICS[message["topic"]]
            if message["ttl"] and number not in self._causes.deleted:
                self._let_expire(int(row))
                continue
            if (number, topic.groups[group]) in live or (number, None) in live:
                continue  # stuck, and reported there
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
        """A ttl is no excuse without a fault if others with that due time were handled in time."""
        self.verdicts.counts["expired"] += 1
        due, ttl = int(self._messages["due"][row]), int(self._messages["ttl"][row])
        around = (due - NEAR_MS) * 1000, (due + ttl + NEAR_MS) * 1000
        if any(one.meets(*around) for one in self._causes.every):
            return
        topic = self._messages["topic"][self._handled["message"]]
        beside = self._handled[
            (topic == self._messages["topic"][row])
            & (self._handled["attempt"] == 1)
            & (abs(self._handled["due"] - due) < NEAR_MS)
        ]
        late = beside["begin"] // 1000 - beside["due"]
        if len(late) >= FEW and late.max() < ttl / 10:
            what = f"let expire, though {len(late)} due with it were handled in {late.max()} ms"
            self.verdicts.accuse("lost", self._run.messages.number(row), what)

    def expired(self) -> None:
        """The server must have ended at least as many messages as were never handled.

        Those that expired, and those that their late policy skipped.
        """
        stats = self._run.final["stats"].values()
        told = sum(one.get("expired", 0) + one.get("skipped", 0) for one in stats)
        unhandled = self.verdicts.counts["expired"]
        if unhandled > told and not self._causes.losses:
            self.verdicts.accuse("lost", 0, f"{unhandled} with a ttl unhandled, {told} ended")

    def again(self) -> None:
        """Every handling after the first must have a cause."""
        for row in np.nonzero(~self._case.is_first)[0]:
            before, again = self._case.hold(int(row) - 1), self._case.hold(int(row))
            message, place = int(self._handled["message"][row]), int(self._handled["place"][row])
            number, do = self._run.messages.number(message), int(self._messages["do"][message])
            if before.verdict == Verdict.FAILED:
                cause = self._of_retry(message, place, before, again)
            else:
                cause = self._causes.of_again(number, place, do, before, again)
            if cause is None:
                self.verdicts.accuse(
                    "unexplained",
                    number,
                    f"handled by process {again.process} (attempt {again.attempt}), "
                    f"{(again.begin - before.last) / 1e6:.3f} s after process {before.process} "
                    f"(attempt {before.attempt}, {Verdict(before.verdict).name})",
                )
            else:
                self.verdicts.again[cause] += 1

    def _of_retry(self, message: int, place: int, before: Hold, again: Hold) -> str | None:
        """The next attempt must follow the pause, unless a sender moved it or there was a fault."""
        number, do = self._run.messages.number(message), int(self._messages["do"][message])
        due = before.end_from + pause_ms(do) * 1000 - CLOCKS_US
        change = self._run.messages.changes.get(message)
        if change is not None and change.kind == "R" and change.answer in ("r", ""):
            is_between = before.begin <= (change.ended or again.begin_by)
            if is_between and change.tried <= again.begin_by:
                due = min(due, change.due * 1000)
        if again.attempt == before.attempt + 1 and again.begin_by >= due:
            return "the attempt before failed"
        return self._causes.of_again(number, place, do, before, again) or self._causes.around(
            before.begin - ACK_US, again.begin
        )

    def astray(self) -> None:
        """Handled as a message of another topic."""
        rows = self._handled
        topic = self._messages["topic"][rows["message"]]
        for row in np.nonzero(topic != rows["place"] // MOST_GROUPS)[0]:
            sent, handled = TOPICS[topic[row]].name, TOPICS[rows["place"][row] // MOST_GROUPS].name
            what = f"sent to {sent}, and handled in {handled}"
            self.verdicts.accuse("unexplained", self._case.number(int(row)), what)

    def left(self) -> None:
        """Live messages at the end must be in garbage, for a reason."""
        for row in self._run.final["live"]:
            where = f"{row['topic']}/{row['group']}"
            if row["state"] != "garbage":
                self.verdicts.accuse(
                    "stuck", row["number"], f"{row['state']} in {where}, {row['id']}"
                )
                continue
            known = self._run.messages.row(row["number"])
            do = None if known is None else Do(self._messages["do"][known])
            if known is None or do not in ENDS_IN_GARBAGE:
                self.verdicts.accuse(
                    "unexplained", row["number"], f"in garbage of {where}: {row['reason']}"
                )
            else:
                self._deserves_garbage(row["number"], known, where)
        bodies = self._run.final["bodies"]
        named = {one["number"] for one in self._run.final["live"] if one["number"]}
        if bodies != len(named):
            self.verdicts.accuse("unexplained", 0, f"{bodies} bodies, {len(named)} live messages")
        for number in self._run.handled.strangers:
            self.verdicts.accuse("unexplained", number, "handled, but sent by nobody")
        for one in self._run.final["findings"]:
            self.verdicts.accuse("unexplained", 0, "fsck: {kind} {topic} {id} {what}".format(**one))

    def _deserves_garbage(self, number: int, message: int, where: str) -> None:
        """Its handler must have given up, or a fault must have used up its attempts."""
        do = Do(self._messages["do"][message])
        rows = self._handled[self._case.handlings(message)]
        verdict, least = NEEDS[do]
        found = len(np.unique(rows["attempt"][rows["verdict"] == verdict]))
        since = int(self._messages["due"][message]) * 1000
        until = int(rows["begin"].max() if len(rows) else since) + SETTLES_US
        # A handler notes that it gives up before any other process can know of it.
        is_excused = do is Do.POISON and self._causes.around(since - ACK_US, until)
        if found < least and not is_excused:
            what = f"{do.name} in garbage of {where} after {found} of {least} attempts"
            self.verdicts.accuse("unexplained", number, what)

    def logs(self) -> None:
        """Errors that a role only logged."""
        for trace in self._run.traces:
            self.verdicts.accuse("unexplained", 0, trace)

    def processes(self) -> None:
        """No role may end before SIGTERM, and then only with exit code 0."""
        for event in self._run.events:
            if event["event"] != "end" or event["how"] == "killed":
                continue
            if event["role"].startswith("archive"):
                continue  # it ends with a server, and reports gaps by its exit code
            if event["code"] == -signal.SIGKILL and event["number"] in self._causes.kills:
                continue  # another fault killed it at the same time
            was_asleep = event["code"] == -signal.SIGTERM and event["age_s"] < STARTS_WITHIN_S
            if event["how"] == "by itself" or (event["code"] and not was_asleep):
                what = f"{event['role']} ended {event['how']} with code {event['code']}"
                self.verdicts.accuse("unexplained", 0, what)
