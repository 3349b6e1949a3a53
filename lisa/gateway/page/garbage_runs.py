"""Actions on all garbage that matches a filter, perhaps at a pace; they outlive their request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from lisa.admin import garbage as garbage_flows
from lisa.admin.garbage import Action, GarbageSelection
from lisa.core.model.errors import LisaError
from lisa.gateway.context import GatewayContext
from lisa.gateway.page import run_records
from lisa.gateway.page.run_records import LEASE_S, RunRecord
from lisa.gateway.problems import ErrorResponse

log = logging.getLogger("lisa.gateway")

PATIENCE_S = 5.0
"""How long a request waits for an action, which then continues in the background."""

RENEW_S = 0.5
"""How often a process renews the record of its run, and notices a request to stop it."""

RELEASE_S = 1.0
"""How long an action that has ended waits for Redis to delete its record."""

POLL_S = 0.05
"""How often a request looks whether the run that it stops has ended."""

FASTEST = 10_000
"""The highest pace that can be chosen, in messages per second."""


@dataclass(slots=True)
class GarbageRun:
    """An action of this process. rate: at most this many messages per second; None: no limit."""

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


class _Lease:
    """The record in Redis of a run of this process, and when it was last renewed."""

    def __init__(self, hub: GatewayContext, topic: str, run: GarbageRun) -> None:
        self._store = hub.store
        self._topic = topic
        self._run = run
        self._renewed = time.monotonic()
        self._record = RunRecord(
            run=f"{hub.name}-{secrets.token_hex(3)}",
            verb=run.verb,
            total=run.total,
            rate=run.rate,
        )

    async def claim(self) -> bool:
        """Write the record, unless another action runs on the topic. Raises LisaError."""
        return await self._store.drive(run_records.claim(self._store, self._topic, self._record))

    @property
    def _is_lost(self) -> bool:
        """Whether the record may have expired, so that another run may have begun."""
        return time.monotonic() - self._renewed > LEASE_S

    def _current(self) -> RunRecord:
        return msgspec.structs.replace(self._record, done=self._run.done)

    async def renew_until_stopped(self) -> None:
        """Renew the record until somebody asks to stop the run, or the record may have expired."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._is_lost:
                log.warning(
                    "%s garbage of %s stops: its record in Redis has not been renewed for %g s",
                    self._run.verb,
                    self._topic,
                    LEASE_S,
                )
                return
            began = time.monotonic()
            flow = run_records.renew(self._store, self._topic, self._current())
            with suppress(LisaError):  # tried again until the lease is lost
                is_asked_to_stop = await self._store.drive(flow)
                self._renewed = began
                if is_asked_to_stop:
                    return

    async def release(self) -> None:
        """Delete the record, unless it may be that of another run."""
        if not self._is_lost:
            flow = run_records.release(self._store, self._topic, self._current())
            with suppress(LisaError, TimeoutError):  # the record expires
                async with asyncio.timeout(RELEASE_S):
                    await self._store.drive(flow)


async def start(
    hub: GatewayContext, selection: GarbageSelection, action: Action, run: GarbageRun
) -> None:
    """Start an action, and wait for its end for at most `PATIENCE_S`.

    Raises ErrorResponse if another one runs on the topic, and LisaError.
    """
    topic = selection.topic
    lease = _Lease(hub, topic, run)
    if not await lease.claim():
        raise ErrorResponse(409, "busy", f"another action on garbage of {topic} is running")
    flow = garbage_flows.act(hub.store, selection, action, rate=run.rate, progress=run.count)

    async def work() -> None:
        acting = asyncio.create_task(hub.store.drive(flow))
        renewal = asyncio.create_task(lease.renew_until_stopped())
        try:
            await asyncio.wait([acting, renewal], return_when=asyncio.FIRST_COMPLETED)
        finally:
            acting.cancel()
            renewal.cancel()
            await asyncio.wait([acting, renewal])
            await lease.release()
        for task in (acting, renewal):
            if not task.cancelled():
                task.result()

    run.task = hub.run_task(work(), f"{run.verb} garbage of {topic}")
    await asyncio.wait([run.task], timeout=PATIENCE_S)
    if run.task.done() and not run.task.cancelled():
        run.task.result()


async def stop(hub: GatewayContext, topic: str) -> int:
    """Stop a topic's action, also if it runs in another process.

    Returns how many messages it had affected. Raises LisaError.
    """
    store, ends = hub.store, time.monotonic() + PATIENCE_S
    record = await store.drive(run_records.read(store, topic))
    if record is None:
        return 0
    await store.drive(run_records.ask_to_stop(store, topic, record.run))
    while True:
        has_ended, done = await store.drive(run_records.progress(store, topic, record))
        if has_ended or time.monotonic() > ends:
            return done
        record = msgspec.structs.replace(record, done=done)
        await asyncio.sleep(POLL_S)


def pace(text: str) -> int | None:
    """The chosen pace in messages per second; None for empty text. Raises ErrorResponse."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) <= FASTEST):
        raise ErrorResponse(400, "form", f"the pace must be a number from 1 to {FASTEST:,}")
    return int(text)
