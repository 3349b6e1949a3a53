"""Actions on all garbage that matches a filter, perhaps at a pace; they outlive their request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lisa.admin import garbage as garbage_flows
from lisa.admin.garbage import Action, GarbageSelection
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse

PATIENCE_S = 5.0
"""How long a request waits for an action, which then continues in the background."""

FASTEST = 10_000
"""The highest pace that can be chosen, in messages per second."""


@dataclass(slots=True)
class GarbageRun:
    """A running action. rate: at most this many messages per second; None: as fast as possible."""

    verb: str
    total: int
    rate: int | None
    done: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the action has not ended."""
        return self.task is not None and not self.task.done()

    def on_end(self, work: Callable[[], None]) -> None:
        """Call `work` when the running action has ended or was stopped."""
        if self.task is not None:
            self.task.add_done_callback(lambda _: work())

    def count(self, done: int) -> None:
        """Record progress."""
        self.done = done


class GarbageRuns:
    """The running actions of one gateway process, at most one per topic."""

    def __init__(self) -> None:
        self._runs: dict[str, GarbageRun] = {}

    def of(self, topic: str) -> GarbageRun | None:
        """The running action of a topic."""
        run = self._runs.get(topic)
        return run if run is not None and run.is_running else None

    async def start(
        self, hub: GatewayContext, selection: GarbageSelection, action: Action, run: GarbageRun
    ) -> None:
        """Start an action, and wait until it has ended, but not for long.

        Raises ErrorResponse if another one runs on the topic, and LisaError.
        """
        topic = selection.topic
        if self.of(topic) is not None:
            raise ErrorResponse(409, "busy", f"another action on garbage of {topic} is running")
        failed: list[Exception] = []
        flow = garbage_flows.act(hub.store, selection, action, rate=run.rate, progress=run.count)

        async def work() -> None:
            try:
                await hub.store.drive(flow)
            except Exception as error:
                failed.append(error)
                raise

        run.task = hub.run_task(work(), f"{run.verb} garbage of {topic}")
        self._runs = {name: one for name, one in self._runs.items() if one.is_running}
        self._runs[topic] = run
        await asyncio.wait([run.task], timeout=PATIENCE_S)
        if failed:
            raise failed[0]

    def stop(self, topic: str) -> int:
        """Stop a topic's action; returns how many messages it had affected."""
        run = self.of(topic)
        if run is None or run.task is None:
            return 0
        run.task.cancel()
        return run.done


def pace(text: str) -> int | None:
    """The chosen pace in messages per second; None for empty text. Raises ErrorResponse."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) <= FASTEST):
        raise ErrorResponse(400, "form", f"the pace must be a number from 1 to {FASTEST:,}")
    return int(text)
