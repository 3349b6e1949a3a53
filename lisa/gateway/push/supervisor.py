"""Finds the targets of all topics, and keeps one pusher for each."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from lisa.admin.push import PushTarget, targets_of_topics
from lisa.core.errors import LisaError, ServerUnavailable
from lisa.gateway.hub import Hub
from lisa.gateway.push.allowed import Allowed
from lisa.gateway.push.poster import Poster
from lisa.gateway.push.pusher import Pusher

__all__ = ["LOOK_EVERY_S", "Supervisor"]

log = logging.getLogger("lisa.gateway.push")

LOOK_EVERY_S = 2.0
TOPICS_PER_LOOK = 1_000
"""So many are asked at a look, in turn, beside those that are known to be pushed."""


class Supervisor:
    """The pushes of one gateway process."""

    def __init__(self, hub: Hub, allowed: Allowed) -> None:
        self._hub = hub
        self._poster = Poster(allowed)
        self._pushers: dict[tuple[str, str], Pusher] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._asked = asyncio.Event()
        self._hinted: set[str] = set()
        self._next = 0

    def ask(self, topic: str) -> None:
        """A topic's targets seem to have changed."""
        self._hinted.add(topic)
        self._asked.set()

    async def look_at(self, topic: str) -> None:
        """They have: when this returns, nothing is taken for a target that is gone."""
        try:
            await self._look({topic})
        except LisaError:
            self.ask(topic)

    async def run(self) -> None:
        """Look every couple of seconds, and when asked, until cancelled."""
        try:
            while not self._hub.room.is_closing:
                self._asked.clear()
                try:
                    await self._look(await self._topics())
                except ServerUnavailable as error:
                    log.debug("push targets are looked up later: %s", error)
                except LisaError as error:
                    log.warning("push targets cannot be looked up: %s", error)
                except Exception:
                    log.exception("push targets cannot be looked up")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._asked.wait()
            await asyncio.Event().wait()  # what is posted finishes until the hub closes
        finally:
            await self._stop()

    async def _look(self, asked: set[str]) -> None:
        found = await self._hub.store.drive(targets_of_topics(self._hub.store, sorted(asked)))
        self._hinted -= asked
        current = {(one.topic, one.group): one for one in found}
        for key in [key for key in self._pushers if key[0] in asked and key not in current]:
            pusher = self._pushers.pop(key)
            log.info("topic %s, group %s: pushed no more", *key)
            self._behind(pusher)
        for key, target in current.items():
            self._keep(key, target)

    def _keep(self, key: tuple[str, str], target: PushTarget) -> None:
        pusher = self._pushers.get(key)
        if pusher is None:
            self._pushers[key] = Pusher(self._hub, self._poster, target, lambda: self.ask(key[0]))
        elif pusher.target != target:
            pusher.change(target)

    async def _topics(self) -> set[str]:
        """Whose targets to look up: of very many topics not all at once."""
        known = await self._hub.store.drive(self._hub.store.topics())
        if self._next >= len(known):
            self._next = 0
        some = known[self._next : self._next + TOPICS_PER_LOOK]
        self._next += TOPICS_PER_LOOK
        return {*some, *self._hinted, *(topic for topic, _ in self._pushers)}

    def _behind(self, pusher: Pusher) -> None:
        grace_s = self._hub.settings.gateway_server.grace.total_seconds()
        pusher.take_no_more()
        task = asyncio.create_task(pusher.stop(grace_s))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stop(self) -> None:
        for pusher in self._pushers.values():
            self._behind(pusher)
        self._pushers.clear()
        if self._stopping:
            await asyncio.wait(self._stopping)
        await self._poster.close()
