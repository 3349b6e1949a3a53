"""Why a message may have been handled again: what befell those who had it in their hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.torture.world import ACK_S, HANG_TIMEOUT_S, Do, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Causes", "Hold", "Window"]

ACK_US = int(ACK_S * 1e6)
SLACK_US = 2_000_000  # a settlement that met no trouble is confirmed long before
EVERYBODY = {"server-kill", "server-stop", "out-of-memory"}
DOORS = {"cut", "delay", "refuse", "hang", "lose-replies"}


class Window(NamedTuple):
    """From when until when (us) something was wrong, and what."""

    since: int
    until: int
    what: str

    def meets(self, since: int, until: int) -> bool:
        """Whether they have an instant in common."""
        return self.since <= until and since <= self.until


class Hold(NamedTuple):
    """One handling, as far as it matters here. `end` is 0 if it never ended."""

    process: int
    begin: int
    end: int
    verdict: int
    attempt: int = 1

    @property
    def last(self) -> int:
        """The last instant that is known of it."""
        return self.end or self.begin


@dataclass
class Causes:
    """What happened in a run, by whom it concerned."""

    kills: dict[int, int] = field(default_factory=dict)
    of_process: dict[int, list[Window]] = field(default_factory=dict)
    of_kind: dict[str, list[Window]] = field(default_factory=dict)
    of_place: dict[int, list[Window]] = field(default_factory=dict)
    of_all: list[Window] = field(default_factory=list)
    every: list[Window] = field(default_factory=list)
    stalls: dict[int, list[Window]] = field(default_factory=dict)
    losses: list[Window] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    kinds: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, events: list[dict[str, Any]], stalls: dict[int, list[tuple[int, int]]]) -> Causes:
        """Read them out of what the stage and the processes wrote down."""
        found = cls()
        for event in events:
            if event["event"] == "start":
                found.kinds[event["number"]] = event["role"].partition("-")[0]
            elif event["event"] == "loss":
                found.losses.append(Window(event["since"], event["until"], "lost by the server"))
            elif event["event"] == "fault":
                found._fault(event)
        for process, times in stalls.items():
            for since, until in times:
                window = Window(since, until, "a process or the server stood still")
                found.stalls.setdefault(process, []).append(window)
        return found

    def _process(self, process: int, window: Window) -> None:
        self.of_process.setdefault(process, []).append(window)

    def _fault(self, event: dict[str, Any]) -> None:
        kind, target = event["kind"], event["target"]
        window = Window(event["since"], event["until"], kind)
        self.every.append(window._replace(until=window.until + ACK_US + SLACK_US))
        for process in event.get("numbers", ()):
            self._process(process, window)
            if "killed" in event:
                self.kills[process] = event["killed"]
        if kind in EVERYBODY:
            self.of_all.append(window)
        for one in _concerned(kind, target):
            self.of_kind.setdefault(one, []).append(window)
        for number in event.get("messages", ()):
            self.named[number] = kind
            if event.get("deleted"):
                self.deleted.add(number)
        if event.get("redelivers"):
            for place in event["places"]:
                self.of_place.setdefault(place, []).append(window)

    def loss_of(self, at: int) -> Window | None:
        """The loss that what was confirmed at an instant may have fallen to."""
        return next((one for one in self.losses if one.since <= at <= one.until), None)

    def stopped(self, process: int, since: int, until: int) -> str | None:
        """What kept a process from noticing in time that a message was no longer its own."""
        return _first(self._on(process), since, until) or _first(
            self.stalls.get(process, ()), since, until
        )

    def of_again(self, number: int, place: int, do: int, before: Hold, again: Hold) -> str | None:
        """Why a handling came after another that had not failed; None: nothing explains it."""
        if before.verdict == Verdict.FAILED:
            return "the attempt before failed"
        if self._killed(before):
            return "its handler was killed"
        if do == Do.HANG and before.last - before.begin >= HANG_TIMEOUT_S * 1e6:
            return "its handler hung beyond its timeout"
        if number in self.named:
            return self.named[number]
        if any(one.meets(before.last, before.last + SLACK_US) for one in self.losses):
            return "the server lost that it was settled"
        since, until = before.begin - ACK_US, _until(before)
        return (
            _first(self._on(before.process), since, until)
            or _first(self.of_place.get(place, ()), since, until)
            or _first(self.of_all, since, until)
            or self.stopped(before.process, since, until)
            or self.stopped(again.process, again.begin - 3 * ACK_US, again.begin)
        )

    def _killed(self, hold: Hold) -> bool:
        killed = self.kills.get(hold.process)
        if killed is None or killed < hold.begin:
            return False
        return not hold.end or killed <= _until(hold)

    def _on(self, process: int) -> list[Window]:
        kind = self.kinds.get(process, "")
        return self.of_process.get(process, []) + self.of_kind.get(kind, [])


def _concerned(kind: str, target: str) -> Sequence[str]:
    """The kinds of handling processes that trouble at a door, or with a gateway, is trouble for."""
    if target.startswith("gateway-"):
        return ["puller"]
    if kind not in DOORS:
        return []
    found = {"consumer": ["consumer"], "gateway": ["puller"], "*": ["consumer", "puller"]}
    return found.get(target, [])


def _until(hold: Hold) -> int:
    """Until when trouble may have kept a settlement from being confirmed."""
    return hold.last + ACK_US + SLACK_US


def _first(windows: Any, since: int, until: int) -> str | None:
    return next((one.what for one in windows if one.meets(since, until)), None)
