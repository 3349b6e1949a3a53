"""Why a message may have been handled again: the faults that affected its handlers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.torture.world import ACK_S, HANG_TIMEOUT_S, Do

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

ACK_US = int(ACK_S * 1e6)
SLACK_US = 2_000_000  # without a fault a settlement is confirmed much sooner
SETTLES_US = ACK_US + SLACK_US
"""A fault counts as over one ack timeout and two seconds after its end."""

MARGIN_US = 50_000
"""How far the stage's clock and a handler's estimate of it may differ."""

EVERYBODY = {"server-kill", "server-stop", "out-of-memory"}
DOORS = {"cut", "delay", "refuse", "hang", "lose-replies"}


class Window(NamedTuple):
    """A fault and its time span (us)."""

    since: int
    until: int
    what: str

    def meets(self, since: int, until: int) -> bool:
        """Whether the spans overlap."""
        return self.since <= until and since <= self.until


class Hold(NamedTuple):
    """The relevant parts of one handling: earliest begin, latest end (0 if it never ended).

    A busy machine answers late, so the bounds may be a tenth of a second apart.
    """

    process: int
    begin: int
    end: int
    verdict: int
    attempt: int
    begin_by: int
    end_from: int

    @property
    def last(self) -> int:
        """The last known instant of the handling."""
        return self.end or self.begin


@dataclass
class Causes:
    """The faults of a run, by what they affected."""

    kills: dict[int, int] = field(default_factory=dict)
    of_process: dict[int, list[Window]] = field(default_factory=dict)
    of_kind: dict[str, list[Window]] = field(default_factory=dict)
    of_place: dict[int, list[Window]] = field(default_factory=dict)
    of_all: list[Window] = field(default_factory=list)
    every: list[Window] = field(default_factory=list)
    stalls: dict[int, list[Window]] = field(default_factory=dict)
    losses: list[Window] = field(default_factory=list)
    named: dict[int, list[Window]] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    kinds: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, events: list[dict[str, Any]], stalls: dict[int, list[tuple[int, int]]]) -> Causes:
        """Collect them from the events of the stage and the processes."""
        found = cls()
        for event in events:
            if event["event"] == "start":
                found.kinds[event["number"]] = _kind_of(event["role"])
            elif event["event"] == "loss":
                found.losses.append(Window(event["since"], event["until"], "lost by the server"))
            elif event["event"] == "fault" and "skipped" not in event:
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
        self.every.append(window._replace(until=window.until + SETTLES_US))
        for process in event.get("numbers", ()):
            self._process(process, window)
            if "killed" in event:
                self.kills[process] = event["killed"]
        if kind in EVERYBODY:
            self.of_all.append(window)
        gateways = [one for one in event.get("rolled", ()) if one.startswith("gateway-")]
        for one in _concerned(kind, gateways[0] if gateways else target):
            self.of_kind.setdefault(one, []).append(window)
        for number in event.get("messages", ()):
            self.named.setdefault(number, []).append(window)
            if event.get("deleted"):
                self.deleted.add(number)
        if event.get("redelivers"):
            for place in event["places"]:
                self.of_place.setdefault(place, []).append(window)

    def loss_of(self, at: int) -> Window | None:
        """The loss that may have affected a confirmation at an instant."""
        return next((one for one in self.losses if one.since <= at <= one.until), None)

    def stopped(self, process: int, since: int, until: int) -> str | None:
        """What kept a process from noticing in time that it had lost a message."""
        return _first(self._on(process), since, until) or _first(
            self.stalls.get(process, ()), since, until
        )

    def held_up(self, process: int, since: int, until: int) -> str | None:
        """The same, or what kept the server from reporting it."""
        return self.stopped(process, since, until) or _first(self.of_all, since, until)

    def of_again(self, number: int, place: int, do: int, before: Hold, again: Hold) -> str | None:
        """Why a handling followed another that had not failed; None if nothing explains it."""
        return self.of_unsettled(number, place, do, before, again.begin) or self.stopped(
            again.process, again.begin - 3 * ACK_US, again.begin
        )

    def of_unsettled(self, number: int, place: int, do: int, hold: Hold, by: int) -> str | None:
        """Why a handling that had not failed may not have been settled by an instant.

        Later faults explain nothing.
        """
        by += MARGIN_US
        if self._killed(hold, by):
            return "its handler was killed"
        if do == Do.HANG and (hold.end or by) - hold.begin >= HANG_TIMEOUT_S * 1e6:
            return "its handler hung beyond its timeout"
        for one in self.named.get(number, ()):
            if one.since <= by:
                return one.what
        if any(one.meets(hold.last, min(hold.last + SLACK_US, by)) for one in self.losses):
            return "the server lost that it was settled"
        since, until = hold.begin - ACK_US, min(_until(hold), by)
        return (
            _first(self._on(hold.process), since, until)
            or _first(self.of_place.get(place, ()), since, until)
            or _first(self.of_all, since, until)
            or self.stopped(hold.process, since, until)
        )

    def around(self, since: int, until: int) -> str | None:
        """Any fault, or any stalled process, within a time span."""
        return (
            _first(self.every, since, until)
            or _first(self.losses, since, until)
            or next(
                (
                    what
                    for process in self.stalls
                    if (what := _first(self.stalls[process], since, until))
                ),
                None,
            )
        )

    def of_failure(self, process: int, since: int, until: int) -> str | None:
        """Why a sender's call was not answered: a fault of sender, server or network."""
        begin = since - SETTLES_US
        return (
            _first(self._on(process), begin, until)
            or _first(self.of_all, begin, until)
            or next(
                (what for one in self.stalls if (what := _first(self.stalls[one], begin, until))),
                None,
            )
        )

    def accountable(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """The handlings that no fault would excuse if their messages were handled again."""
        last = np.where(rows["end"] > 0, rows["end"], rows["begin"])
        since, until = rows["begin"] - ACK_US, last + SETTLES_US
        excused = meet(self.losses, last, last + SLACK_US)
        excused |= meet(self.of_all, since, until)
        for process in np.unique(rows["process"]):
            own = rows["process"] == process
            windows = self._on(int(process)) + self.stalls.get(int(process), [])
            if int(process) in self.kills:
                killed = self.kills[int(process)]
                windows.append(Window(killed, killed, "killed"))
            excused[own] |= meet(windows, since[own], until[own])
        for place, windows in self.of_place.items():
            own = rows["place"] == place
            excused[own] |= meet(windows, since[own], until[own])
        return ~excused

    def _killed(self, hold: Hold, by: int) -> bool:
        killed = self.kills.get(hold.process)
        if killed is None or not hold.begin <= killed <= by:
            return False
        return not hold.end or killed <= _until(hold)

    def _on(self, process: int) -> list[Window]:
        kind = self.kinds.get(process, "")
        return self.of_process.get(process, []) + self.of_kind.get(kind, [])


def _kind_of(role: str) -> str:
    """The kind of roles that share the same faults. HTTP clients depend on the gateway."""
    return "http" if role == "producer-http" else role.partition("-")[0]


def merged(windows: Iterable[Window]) -> list[tuple[int, int]]:
    """The spans with any fault, sorted and without overlaps."""
    found: list[tuple[int, int]] = []
    for since, until, _ in sorted(windows):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        else:
            found.append((since, until))
    return found


def meet(
    windows: Iterable[Window], since: NDArray[np.int64], until: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which spans overlap with any window."""
    apart = merged(windows)
    if not apart:
        return np.zeros(len(since), bool)
    starts, ends = np.array(apart, np.int64).T
    last = np.searchsorted(starts, until, "right") - 1
    return np.asarray((last >= 0) & (ends[last] >= since))


def _concerned(kind: str, target: str) -> Sequence[str]:
    """The kinds of processes that a fault at a door, or of a gateway, affects."""
    if target.startswith("gateway-"):
        return ["puller", "http"]
    if kind not in DOORS:
        return []
    every = {"consumer": ["consumer"], "producer": ["producer"], "gateway": ["puller", "http"]}
    return [one for door, kinds in every.items() if target in (door, "*") for one in kinds]


def _until(hold: Hold) -> int:
    """Until when a fault may have delayed a settlement's confirmation."""
    return hold.last + ACK_US + SLACK_US


def _first(windows: Any, since: int, until: int) -> str | None:
    return next((one.what for one in windows if one.meets(since, until)), None)
