"""Why a message may have been handled again: the faults that affected its handlers."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.torture.world import ACK_S, HANG_TIMEOUT_S, Do

ACK_US = int(ACK_S * 1e6)
SLACK_US = 2_000_000  # without a fault a settlement is confirmed much sooner
SETTLES_US = ACK_US + SLACK_US
"""A fault counts as over one ack timeout and two seconds after its end."""

MARGIN_US = 50_000
"""How far the stage's clock and a handler's estimate of it may differ."""

EVERYBODY = {"server-kill", "server-stop", "out-of-memory"}
DOORS = {"cut", "delay", "refuse", "hang", "lose-replies"}
BEHIND = {
    "consumer": ("consumer",),
    "producer": ("producer",),
    "gateway": ("puller", "http"),
    "manager": (),
    "*": ("consumer", "producer", "puller", "http"),
}
"""The kinds of processes whose calls and settlements pass each door."""


class Window(NamedTuple):
    """A fault and its time span (us)."""

    since: int
    until: int
    what: str

    def meets(self, since: int, until: int) -> bool:
        """Whether the spans overlap."""
        return self.since <= until and since <= self.until


class Causes:
    """The faults of a run, by what they affected.

    windows: for these keys: `any` fault, with the time until it counts as over; faults that affect
        `all` processes; a `loss` of data by the server; a `stall` of any process; and those of one
        process, stalls of one process, and those of one kind, place or message.
    kills: when each killed process was killed; `consumer_kills`: when consumers were, in order.
    deleted: messages whose bodies the run deleted.
    """

    def __init__(
        self, events: list[dict[str, Any]], stalls: dict[int, list[tuple[int, int]]]
    ) -> None:
        self.windows: dict[Hashable, list[Window]] = defaultdict(list)
        self.kills: dict[int, int] = {}
        self.deleted: set[int] = set()
        self._kinds: dict[int, str] = {}
        for event in events:
            if event["event"] == "start":
                kind = event["role"].partition("-")[0]
                is_http = event["role"] == "producer-http"  # depends on the gateway
                self._kinds[event["number"]] = "http" if is_http else kind
            elif event["event"] == "loss":
                self._add(Window(event["since"], event["until"], "lost by the server"), "loss")
            elif event["event"] == "fault" and "skipped" not in event:
                self._fault(event)
        for process, times in stalls.items():
            for since, until in times:
                stall = Window(since, until, "a process or the server stood still")
                self._add(stall, "stall", ("stall", process))

    def _add(self, window: Window, *keys: Hashable) -> None:
        for key in keys:
            self.windows[key].append(window)

    def _fault(self, event: dict[str, Any]) -> None:
        kind, target = event["kind"], event["target"]
        window = Window(event["since"], event["until"], kind)
        self._add(window._replace(until=window.until + SETTLES_US), "any")
        self._add(window, *[("process", process) for process in event.get("numbers", ())])
        if "killed" in event:
            self.kills |= dict.fromkeys(event["numbers"], event["killed"])
        if kind in EVERYBODY:
            self._add(window, "all")
        if any(role.startswith("gateway-") for role in [target, *event.get("rolled", ())]):
            self._add(window, *[("kind", behind) for behind in BEHIND["gateway"]])
        elif kind in DOORS:
            self._add(window, *[("kind", behind) for behind in BEHIND[target]])
        self._add(window, *[("message", number) for number in event.get("messages", ())])
        if event.get("deleted"):
            self.deleted.update(event["messages"])
        if event.get("redelivers"):
            self._add(window, *[("place", place) for place in event["places"]])

    @property
    def consumer_kills(self) -> list[int]:
        return sorted(at for one, at in self.kills.items() if self._kinds.get(one) == "consumer")

    def _on(self, process: int) -> Sequence[Hashable]:
        return ("process", process), ("kind", self._kinds.get(process))

    @property
    def damaged(self) -> set[int]:
        """The messages that the run damaged, in any way."""
        pairs = (key for key in self.windows if isinstance(key, tuple))
        return {number for kind, number in pairs if kind == "message"}

    def first(self, since: int, until: int, *keys: Hashable) -> str | None:
        """The first fault within a time span, in order of these keys."""
        windows = (window for key in keys for window in self.windows.get(key, ()))
        return next((window.what for window in windows if window.meets(since, until)), None)

    def loss_of(self, at: int) -> Window | None:
        """The loss that may have affected a confirmation at an instant."""
        return next((loss for loss in self.windows["loss"] if loss.meets(at, at)), None)

    def stopped(self, process: int, since: int, until: int) -> str | None:
        """What kept a process from noticing in time that it had lost a message."""
        return self.first(since, until, *self._on(process), ("stall", process))

    def held_up(self, process: int, since: int, until: int) -> str | None:
        """The same, or what kept the server from reporting it."""
        return self.stopped(process, since, until) or self.first(since, until, "all")

    def around(self, since: int, until: int) -> str | None:
        """Any fault, or any stalled process, within a time span."""
        return self.first(since, until, "any", "loss", "stall")

    def of_failure(self, process: int, since: int, until: int) -> str | None:
        """Why a sender's call was not answered: a fault of sender, server or network."""
        return self.first(since - SETTLES_US, until, *self._on(process), "all", "stall")

    def of_again(self, number: int, do: int, before: Any, again: Any) -> str | None:
        """Why a handling followed another that had not failed; None if nothing explains it."""
        return self.of_unsettled(number, do, before, again.begin) or self.stopped(
            again.process, again.begin - 3 * ACK_US, again.begin
        )

    def of_unsettled(self, number: int, do: int, handling: Any, by: int) -> str | None:
        """Why a handling that had not failed may not have been settled by an instant.

        Later faults explain nothing.
        """
        by += MARGIN_US
        begin, process = handling.begin, handling.process
        last = handling.end or begin
        killed = self.kills.get(process)
        until = min(last + SETTLES_US, by) if handling.end else by
        if killed is not None and begin <= killed <= until:
            return "its handler was killed"
        if do == Do.HANG and (handling.end or by) - begin >= HANG_TIMEOUT_S * 1e6:
            return "its handler hung beyond its timeout"
        if what := self.first(0, by, ("message", number)):
            return what
        if self.first(last, min(last + SLACK_US, by), "loss"):
            return "the server lost that it was settled"
        place = ("place", handling.place)
        keys = (*self._on(process), place, "all", ("stall", process))
        return self.first(begin - ACK_US, min(last + SETTLES_US, by), *keys)

    def accountable(self, rows: Any) -> NDArray[np.bool_]:
        """The handlings that no fault would excuse if their messages were handled again."""
        last = np.where(rows.end > 0, rows.end, rows.begin)
        lost = meet(self.windows["loss"], last, last + SLACK_US)
        return self.undisturbed(rows, rows.begin - ACK_US, last + SETTLES_US) & ~lost

    def undisturbed(
        self, rows: Any, since: NDArray[np.int64], until: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """The handlings whose processes and places no fault affected in these spans."""
        excused = meet(self.windows["all"], since, until)
        for process in np.unique(rows.process).tolist():
            own = rows.process == process
            keys = (*self._on(process), ("stall", process))
            windows = [window for key in keys for window in self.windows.get(key, ())]
            if killed := self.kills.get(process):
                windows.append(Window(killed, killed, "killed"))
            excused[own] |= meet(windows, since[own], until[own])
        for place in np.unique(rows.place).tolist():
            own = rows.place == place
            excused[own] |= meet(self.windows.get(("place", place), ()), since[own], until[own])
        return ~excused


def meet(
    windows: Iterable[Window], since: NDArray[np.int64], until: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which spans overlap with any window."""
    apart: list[tuple[int, int]] = []  # sorted and without overlaps
    for begin, end, _ in sorted(windows):
        if apart and begin <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((begin, end))
    if not apart:
        return np.zeros(len(since), bool)
    starts, ends = np.array(apart, np.int64).T
    last = np.searchsorted(starts, until, "right") - 1
    return np.asarray((last >= 0) & (ends[last] >= since))
