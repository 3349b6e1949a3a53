"""One target: messages are taken for it as it has room for them, and settled as it answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

from lisa.admin.push import PushTarget, find
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.gateway.hub import Hub
from lisa.gateway.push.pace import DEGRADED_AFTER, Pace
from lisa.gateway.push.poster import Answer, Poster, Verdict
from lisa.gateway.waiting import Crowded, Delivery

__all__ = ["Pusher"]

log = logging.getLogger("lisa.gateway.push")

WAIT_S = 20.0
"""How long one pull waits for a message."""

LOOK_AGAIN_S = 0.5
SETTLE_WITHIN_S = 60.0
"""How long it is tried to settle a push while the server is away."""


class Pusher:
    """Pushes one group's messages; `ask_again` is called when the target seems to have changed."""

    def __init__(
        self, hub: Hub, poster: Poster, target: PushTarget, ask_again: Callable[[], None]
    ) -> None:
        self.target = target
        self._hub = hub
        self._poster = poster
        self._ask_again = ask_again
        self._pace = Pace()
        self._active: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_full = False
        self._task = asyncio.create_task(self._run(), name=f"push {target.topic}")

    @property
    def _where(self) -> str:
        return f"topic {self.target.topic}, group {self.target.group}"

    def change(self, target: PushTarget) -> None:
        """Go on with another URL, secret or bound; what is under way finishes as it began."""
        if target.url != self.target.url or target.secret != self.target.secret:
            log.info("%s: pushed to %s from now on", self._where, _host_of(target))
            self._pace = Pace()
        self.target = target
        self._changed.set()

    def take_no_more(self) -> None:
        """From now on nothing is pushed that is not under way."""
        self._task.cancel()

    async def stop(self, grace_s: float) -> None:
        """After that: what is posted may finish within the time, the rest goes back."""
        with suppress(asyncio.CancelledError):
            await self._task
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        left = list(self._active)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _run(self) -> None:
        log.info("%s: pushed to %s", self._where, _host_of(self.target))
        while not self._hub.room.is_closing:
            self._changed.clear()
            left_s = self._pace.left_s  # looked at first: a rest that ends after this is over
            free = self._free()
            if free <= 0:
                self._is_full = True
                await self._until(left_s or None)
                self._is_full = False
                continue
            try:
                deliveries = await self._take(free)
            except Crowded:
                await asyncio.sleep(LOOK_AGAIN_S)
            except GroupRemoved:
                self._ask_again()
                await asyncio.sleep(LOOK_AGAIN_S)
            except ServerUnavailable:
                await asyncio.sleep(LOOK_AGAIN_S)
            except LisaError as error:
                log.warning("%s: nothing can be taken for the push: %s", self._where, error)
                await asyncio.sleep(WAIT_S)
            except Exception:
                log.exception("%s: nothing can be taken for the push", self._where)
                await asyncio.sleep(WAIT_S)
            else:
                for one in deliveries:
                    self._begin(one)

    def _free(self) -> int:
        """How many pushes may begin now."""
        if self._pace.left_s > 0:
            return 0
        own = self.target.concurrency or self._hub.settings.gateway_server.push_concurrency
        return self._pace.most(own) - len(self._active)

    async def _until(self, seconds: float | None) -> None:
        """Rest until something changes, or for so long."""
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with the change.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _take(self, most: int) -> list[Delivery]:
        """Wait for deliveries; none if there is a reason to look anew before."""
        target = self.target
        current = await self._hub.store.drive(find(self._hub.store, target.topic, target.group))
        if current != target:
            # A pull would declare the group that was just removed, or go to the old URL.
            self._ask_again()
            await self._until(LOOK_AGAIN_S)
            return []
        pull = asyncio.create_task(self._hub.room.take(target.topic, target.group, most, WAIT_S))
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({pull, change}, return_when=asyncio.FIRST_COMPLETED)
            if not pull.done():
                return []
            deliveries = pull.result()
            room = max(0, self._free()) if self.target == target else 0
            self._hub.room.give_back(deliveries[room:])
            return deliveries[:room]
        except asyncio.CancelledError:
            if pull.done() and not pull.cancelled() and pull.exception() is None:
                self._hub.room.give_back(pull.result())
            raise
        finally:
            change.cancel()
            if not pull.done():
                pull.cancel()
                await asyncio.wait({pull})

    def _begin(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._push(delivery))
        self._active.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._active.discard(task)
        if self._is_full:  # a pull that waits is not disturbed: it takes no more than it may
            self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a push failed", self._where, exc_info=error)

    async def _push(self, delivery: Delivery) -> None:
        target, pace = self.target, self._pace  # whose answer it is, whatever they become meanwhile
        try:
            answer = await self._post(delivery, target)
            self._hub.meter.pushes.add(1, answer.verdict.value)
            self._judge(delivery, answer, pace, _host_of(target))
            await self._settle(delivery, answer)
        except asyncio.CancelledError:
            self._hub.room.give_back([delivery])
            raise

    async def _post(self, delivery: Delivery, target: PushTarget) -> Answer:
        """Post it, and keep it in flight for as long as that takes."""
        default = self._hub.settings.gateway_server.push_timeout.total_seconds()
        timeout_s = target.timeout_ms / 1000 if target.timeout_ms else default
        beat_s: float | None = target.ack_timeout_ms / 3000
        posting = asyncio.create_task(self._poster.post(target, delivery.message, timeout_s))
        try:
            while not (await asyncio.wait({posting}, timeout=beat_s))[0]:
                if not await self._extend(delivery):
                    beat_s = None  # it was taken over; its answer still counts if it is in time
            return posting.result()
        finally:
            if not posting.done():
                posting.cancel()
                await asyncio.wait({posting})

    async def _extend(self, delivery: Delivery) -> bool:
        try:
            return await self._hub.settler.extend(delivery.message.topic, delivery.receipt)
        except ServerUnavailable:
            return True
        except LisaError:
            return False

    def _judge(self, delivery: Delivery, answer: Answer, pace: Pace, host: str) -> None:
        """What the answer says of the target, beside the message."""
        if answer.verdict is Verdict.DONE:
            if pace.arrived():
                log.info("%s: pushes to %s arrive again", self._where, host)
            return
        log.warning("%s: message %s, attempt %d, was not taken by %s: %s", self._where,
                    delivery.message.id, delivery.message.attempt, host,
                    answer.reason)  # fmt: skip
        if answer.verdict is Verdict.LATER:
            pace.asked_to_wait(answer.wait_s)
        elif pace.failed():
            log.warning("%s: degraded after %d failed pushes to %s in a row", self._where,
                        DEGRADED_AFTER, host)  # fmt: skip
        if pace.left_s > 0:
            self._changed.set()  # nothing is to be taken meanwhile

    async def _settle(self, delivery: Delivery, answer: Answer) -> None:
        topic, receipt, settler = delivery.message.topic, delivery.receipt, self._hub.settler
        if answer.verdict is Verdict.DONE:
            await self._insisting(lambda: settler.ack(topic, receipt), delivery)
            return
        delay = round(answer.wait_s * 1000) if answer.verdict is Verdict.LATER else None
        await self._insisting(
            lambda: settler.retry(topic, receipt, reason=answer.reason, delay=delay), delivery
        )

    async def _insisting(self, call: Callable[[], Awaitable[object]], delivery: Delivery) -> None:
        """Settle, also through an outage: a push that arrived should not arrive twice."""
        ends = time.monotonic() + SETTLE_WITHIN_S
        while True:
            try:
                await call()
            except ServerUnavailable as error:
                if time.monotonic() < ends and not self._hub.room.is_closing:
                    await asyncio.sleep(LOOK_AGAIN_S)
                    continue
                log.warning("%s: message %s is settled by nobody and comes again: %s", self._where,
                            delivery.message.id, error)  # fmt: skip
            except LisaError as error:
                log.warning("%s: message %s went with its group: %s", self._where,
                            delivery.message.id, error)  # fmt: skip
            return


def _host_of(target: PushTarget) -> str:
    # Neither path nor query: those of a web hook are often its password.
    return urlsplit(target.url).netloc
