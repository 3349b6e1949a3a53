"""Pulls messages, posts them to one push target, and settles them by its responses."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from lisa.admin.push import StoredPushTarget, find
from lisa.core.daemon.threads import unforeseen
from lisa.core.delivery.pace import DEGRADED_AFTER, FIRST_S, LONGEST_S, Degradation
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.keys import shown_id
from lisa.core.model.message import Message
from lisa.core.store.presence import PushPresence
from lisa.core.store.store import caller
from lisa.gateway.context import GatewayContext
from lisa.gateway.pulls import BEAT_S, HandedOut
from lisa.gateway.push.poster import Poster, PushResult, PushVerdict

log = logging.getLogger("lisa.gateway.push")

WAIT_S = 20.0
"""How long one pull waits for a message."""

LOOK_AGAIN_S = 0.5

SETTLE_WITHIN_S = 60.0
"""How long to keep trying to settle a push while Redis is unavailable."""


class TargetRecord:
    """One gateway's record of how one target responded.

    A degraded target, or one that asked to wait, gets one message at a time until a push succeeds.
    """

    def __init__(self) -> None:
        self.resumes = 0.0
        self._degradation = Degradation()
        self._faults = Backoff(FIRST_S, LONGEST_S)
        self._fault: tuple[str, float] | None = None  # why this gateway cannot push; since when
        self._wish: tuple[str, float] | None = None  # how the target asked to wait; since when
        self._limits = 0  # of keys, since the last push that succeeded

    def presence(self, group: str, host: str) -> PushPresence:
        """This record as other roles see it."""
        now, row = time.monotonic(), self._degradation
        error, since = self._fault or self._wish or ("", now)
        state = "waiting" if self._wish else "running"
        if row.is_degraded or self._fault:
            state = "degraded"
        return PushPresence(
            group=group,
            host=host,
            state=state,
            failed=row.failed_in_row,
            failing_ms=max(row.failing_ms, round((now - since) * 1000)),
            error=error if self._fault else row.error or error,
        )

    @property
    def is_degraded(self) -> bool:
        """Whether too many pushes failed in a row."""
        return self._degradation.is_degraded

    @property
    def left_s(self) -> float:
        """Seconds until the next push may start."""
        return max(0.0, self.resumes - time.monotonic())

    def most(self, concurrency: int) -> int:
        """The number of pushes that may run at the same time."""
        return 1 if self.is_degraded or self._wish or self._fault else concurrency

    def succeeded(self) -> bool:
        """Record a successful push; returns whether it ended a slow period."""
        was_slowed = self._reached() or self._wish is not None
        was_slowed = self._degradation.succeeded() or was_slowed
        self._limits = 0
        if not self.left_s:  # a push that began before the wait does not end it
            self._wish = None
        return was_slowed and self._wish is None

    def failed(self, error: str) -> bool:
        """Record a failed push; returns whether the target has just become degraded."""
        self._reached()
        has_begun = self._degradation.failed(error)
        if self.is_degraded and not self.left_s:  # concurrent failures cost one pause
            self._rest(self._degradation.backoff.take())
        return has_begun

    def asked_to_wait(self, seconds: float, error: str) -> None:
        """Record that the target asked for no push for `seconds`."""
        self._reached()
        self._wish = error, self._wish[1] if self._wish else time.monotonic()
        self._rest(seconds)

    def met_limit_of_key(self, seconds: float, error: str) -> None:
        """Record that a key has to wait; after many in a row, the target waits, too."""
        self._reached()
        self._limits += 1
        if self._limits >= DEGRADED_AFTER:
            self.asked_to_wait(seconds, error)

    def could_not_push(self, error: str) -> bool:
        """Record a fault of the gateway itself; returns whether it has just begun."""
        has_begun = self._fault is None
        self._fault = error, self._fault[1] if self._fault else time.monotonic()
        if not self.left_s:
            self._rest(self._faults.take())
        return has_begun

    def _reached(self) -> bool:
        """Record that the target was asked; returns whether that ended a fault of the gateway."""
        was_faulty, self._fault = self._fault is not None, None
        self._faults.reset()
        return was_faulty

    def _rest(self, seconds: float) -> None:
        self.resumes = max(self.resumes, time.monotonic() + seconds)


class Pusher:
    """Pushes one group's messages. Calls `reload` when the target seems to have changed."""

    def __init__(
        self,
        gateway: GatewayContext,
        poster: Poster,
        target: StoredPushTarget,
        reload: Callable[[], None],
    ) -> None:
        self.target = target
        self._gateway = gateway
        self._poster = poster
        self._reload = reload
        self._pace = TargetRecord()
        self._active: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_full = False
        for verdict in PushVerdict:
            gateway.meter.pushes.add(0, target.topic, verdict.value)
        gateway.broker.presence.add_push(target.topic, target.group, self._presence)
        self._task = asyncio.create_task(self._run(), name=f"push {target.topic}")

    def _presence(self) -> PushPresence:
        return self._pace.presence(self.target.group, _host_of(self.target))

    @property
    def _where(self) -> str:
        return f"topic {self.target.topic}, group {self.target.group}"

    def change(self, target: StoredPushTarget) -> None:
        """Use a changed target from now on; pushes in progress keep the old target."""
        if target.url != self.target.url or target.secret != self.target.secret:
            log.info("%s: now pushing to %s", self._where, _host_of(target))
            self._pace = TargetRecord()
        self.target = target
        self._changed.set()

    def stop_pulling(self) -> None:
        """Stop pulling messages; pushes in progress continue."""
        self._task.cancel()

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for pushes in progress, then release their messages.

        Call `stop_pulling` first.
        """
        with suppress(asyncio.CancelledError):
            await self._task
        self._gateway.broker.presence.drop_push(
            self.target.topic, self.target.group, self._presence
        )
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        for task in self._active:
            task.cancel()
        if self._active:
            await asyncio.wait(self._active)

    async def _run(self) -> None:
        caller.set("")  # not on behalf of the request that set the target
        log.info("%s: pushing to %s", self._where, _host_of(self.target))
        while not self._gateway.broker.is_closing:
            try:
                await self._round()
            except GroupRemoved:
                self._reload()
                await asyncio.sleep(LOOK_AGAIN_S)
            except ServerUnavailable:
                await asyncio.sleep(LOOK_AGAIN_S)
            except LisaError as error:
                log.warning("%s: cannot pull messages to push: %s", self._where, error)
                await asyncio.sleep(WAIT_S)
            except Exception as error:  # noqa: BLE001  logged, and tried again
                unforeseen(f"{self._where}: push", error)
                await asyncio.sleep(WAIT_S)

    async def _round(self) -> None:
        """Pull as many messages as can be pushed now, or wait until one can."""
        self._changed.clear()
        # Read before `_free`: if the pause ended in between, 0 would mean a wait without limit.
        left_s = self._pace.left_s
        free = self._free()
        if free <= 0:
            self._is_full = True
            await self._gateway.broker.presence.announce(self.target.topic, self.target.group)
            await self._until(min(left_s or BEAT_S, BEAT_S))
            self._is_full = False
            return
        for delivery in await self._take(free):
            self._begin(delivery)

    def _free(self) -> int:
        """The number of pushes that may start now."""
        if self._pace.left_s > 0:
            return 0
        concurrency = (
            self.target.concurrency or self._gateway.settings.gateway_server.push_concurrency
        )
        return self._pace.most(concurrency) - len(self._active)

    async def _until(self, seconds: float) -> None:
        """Sleep until something changes, at most `seconds`."""
        # Not wait_for: before Python 3.12 it can lose a cancellation that coincides with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _take(self, most: int) -> list[HandedOut]:
        """Pull deliveries; empty if the target or its free capacity changed meanwhile."""
        target = self.target
        current = await self._gateway.ask(find, target.topic, target.group)
        if current != target:
            # A pull would declare a group that was just removed, or push to the old URL.
            self._reload()
            await self._until(LOOK_AGAIN_S)
            return []
        pull = asyncio.create_task(
            self._gateway.broker.pull(target.topic, group=target.group, most=most, wait_s=WAIT_S)
        )
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({pull, change}, return_when=asyncio.FIRST_COMPLETED)
            if not pull.done():
                return []
            deliveries = pull.result()
            room = max(0, self._free()) if self.target == target else 0
            self._gateway.broker.give_back(deliveries[room:])
            return deliveries[:room]
        except asyncio.CancelledError:
            if pull.done() and not pull.cancelled() and pull.exception() is None:
                self._gateway.broker.give_back(pull.result())
            raise
        finally:
            change.cancel()
            if not pull.done():
                pull.cancel()
                await asyncio.wait({pull})

    def _begin(self, delivery: HandedOut) -> None:
        task = asyncio.create_task(self._push(delivery))
        self._active.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._active.discard(task)
        if self._is_full:  # otherwise a pull is waiting, within its limit
            self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            unforeseen(f"{self._where}: one push", error)

    async def _push(self, delivery: HandedOut) -> None:
        target, pace = self.target, self._pace  # a change of target must not affect this push
        try:
            answer = await self._post(delivery, target)
            self._gateway.meter.pushes.add(1, self.target.topic, answer.verdict.value)
            self._record(delivery, answer, pace, _host_of(target))
            await self._settle(delivery, answer)
        except asyncio.CancelledError:
            self._gateway.broker.give_back([delivery])
            raise

    async def _post(self, delivery: HandedOut, target: StoredPushTarget) -> PushResult:
        """Post a delivery and extend its ack timeout until the post ends."""
        default = self._gateway.settings.gateway_server.push_timeout.total_seconds()
        timeout_s = target.timeout_ms / 1000 if target.timeout_ms else default
        beat_s: float | None = target.ack_timeout_ms / 3000
        posting = asyncio.create_task(self._poster.post(target, delivery.message, timeout_s))
        try:
            while not (await asyncio.wait({posting}, timeout=beat_s))[0]:
                if not await self._extend(delivery):
                    beat_s = None  # reclaimed; the response may still arrive in time
            return posting.result()
        finally:
            if not posting.done():
                posting.cancel()
                await asyncio.wait({posting})

    async def _extend(self, delivery: HandedOut) -> bool:
        try:
            return await self._gateway.settler.extend(delivery.message.topic, delivery.receipt)
        except ServerUnavailable:
            return True
        except LisaError:
            return False

    def _record(
        self, delivery: HandedOut, answer: PushResult, pace: TargetRecord, host: str
    ) -> None:
        """Log the answer and adjust the target's pace."""
        if answer.verdict is PushVerdict.DONE:
            if pace.succeeded():
                log.info("%s: pushes to %s succeed again", self._where, host)
            return
        if answer.verdict is PushVerdict.FAULT:
            if pace.could_not_push(answer.reason):
                log.error(
                    "%s: this gateway cannot push to %s, for which no message is charged: %s",
                    self._where,
                    host,
                    answer.reason,
                )
            self._changed.set()
            return
        log.warning(
            "%s: message %s, attempt %d, was not accepted by %s: %s%s",
            self._where,
            shown_id(delivery.message.id),
            delivery.message.attempt,
            host,
            answer.reason,
            answer.detail,
            extra=delivery.message.log_fields,
        )
        if answer.rests_lane:
            pace.met_limit_of_key(answer.wait_s, answer.reason)
        elif answer.verdict is PushVerdict.LATER:
            pace.asked_to_wait(answer.wait_s, answer.reason)
        elif pace.failed(answer.reason):
            log.warning(
                "%s: degraded after %d failed pushes to %s in a row",
                self._where,
                DEGRADED_AFTER,
                host,
            )
        if pace.left_s > 0:
            self._changed.set()  # stop a waiting pull

    async def _settle(self, delivery: HandedOut, answer: PushResult) -> None:
        """Settle, retrying through an outage, so that a successful push is not repeated."""
        message, settler = delivery.message, self._gateway.settler
        held = message.topic, delivery.receipt
        settle: Callable[[], Awaitable[object]]
        match answer.verdict:
            case PushVerdict.FAULT:
                self._gateway.broker.give_back([delivery])
                return
            case PushVerdict.DONE:
                settle = partial(settler.ack, *held)
            case PushVerdict.LATER:
                wait_ms = math.ceil(answer.wait_s * 1000)
                settle = partial(
                    settler.defer,
                    *held,
                    delay_ms=wait_ms,
                    reason=answer.reason,
                    rests_lane=answer.rests_lane,
                )
            case PushVerdict.FAILED:
                settle = partial(settler.retry, *held, reason=answer.reason)
        ends = time.monotonic() + SETTLE_WITHIN_S
        while True:
            try:
                await settle()
            except ServerUnavailable as error:
                if time.monotonic() < ends and not self._gateway.broker.is_closing:
                    await asyncio.sleep(LOOK_AGAIN_S)
                    continue
                self._log_unsettled(message, "was not settled; it will be redelivered", error)
            except LisaError as error:
                self._log_unsettled(message, "was removed with its group", error)
            return

    def _log_unsettled(self, message: Message, outcome: str, error: LisaError) -> None:
        text, shown = "%s: message %s %s: %s", shown_id(message.id)
        log.warning(text, self._where, shown, outcome, error, extra=message.log_fields)


def _host_of(target: StoredPushTarget) -> str:
    # Without path and query, which often contain a web hook's secret.
    return urlsplit(target.url).netloc
