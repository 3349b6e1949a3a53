"""Pushes: each delivery of a group is POSTed to a web hook, signed, and settled by the response.

Any number of gateways share the work: each pulls as many messages as its targets have capacity for.
Targets are set with `lisa topic push` or through the native API.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

from starlette.routing import BaseRoute

from lisa.admin.push import targets_of_topics
from lisa.core.daemon.threads import unforeseen
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import is_shard_name
from lisa.core.model.sharding import Topic, topics_of
from lisa.core.redis.flow import Flow
from lisa.core.settings import GatewaySettings
from lisa.core.store.paging import START, member_page
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.gateway.context import GatewayContext
from lisa.gateway.push.network import Allowed
from lisa.gateway.push.poster import Poster, certificates
from lisa.gateway.push.pusher import Pusher

log = logging.getLogger("lisa.gateway.push")

LOOK_EVERY_S = 2.0
TOPICS_PER_LOOK = 1_000
"""Topics checked per round, in turn, in addition to topics with known targets."""


def some_topics(store: Store, cursor: bytes, least: int) -> Flow[tuple[bytes, set[Topic]]]:
    """At least `least` of the registered topics after a cursor, or the rest; and the next cursor.

    Reads few names at a time, because there may be 100,000. A topic that is listed while the cursor
    passes from `START` to `START` is returned.
    """
    found: set[Topic] = set()
    while True:
        cursor, names = yield from member_page(store, "ZSCAN", store.keys.topics, cursor)
        found.update(topics_of(name for name in map(text, names) if is_shard_name(name)))
        if cursor == START or len(found) >= least:
            return cursor, found


class PushSupervisor:
    """The pushes of one gateway process."""

    def __init__(self, gateway: GatewayContext, allowed: Allowed) -> None:
        self._gateway = gateway
        self._poster = Poster(allowed, gateway.clock)
        self._pushers: dict[tuple[str, str], Pusher] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._asked = asyncio.Event()
        self._hinted: set[str] = set()
        self._cursor = START

    def reload_later(self, topic: str) -> None:
        """Reload a topic's targets in the next round, starting it now."""
        self._hinted.add(topic)
        self._asked.set()

    async def reload(self, topic: str) -> None:
        """Reload a topic's targets. On return, no messages are pulled for removed targets."""
        try:
            await self._load({topic})
        except LisaError:
            self.reload_later(topic)

    async def run(self) -> None:
        """Load the targets every two seconds, and on request, until cancelled."""
        try:
            while not self._gateway.broker.is_closing:
                self._asked.clear()
                try:
                    await self._load(await self._topics())
                except ServerUnavailable as error:
                    log.debug("push targets will be loaded later: %s", error)
                except LisaError as error:
                    log.warning("push targets cannot be loaded: %s", error)
                except Exception as error:  # noqa: BLE001  logged, and tried again
                    unforeseen("push targets", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._asked.wait()
            await asyncio.Event().wait()  # pushes in progress continue until the gateway closes
        finally:
            await self._stop()

    async def _load(self, asked: set[str]) -> None:
        found = await self._gateway.ask(targets_of_topics, sorted(asked))
        self._hinted -= asked
        current = {(target.topic, target.group): target for target in found}
        for key in [key for key in self._pushers if key[0] in asked and key not in current]:
            log.info("topic %s, group %s: push target removed", *key)
            self._stop_pusher(self._pushers.pop(key))
        for key, target in current.items():
            known = self._pushers.get(key)
            if known is None:
                reload = partial(self.reload_later, target.topic)
                self._pushers[key] = Pusher(self._gateway, self._poster, target, reload)
            elif known.target != target:
                known.change(target)

    async def _topics(self) -> set[str]:
        """The topics whose targets to load in this round."""
        self._cursor, listed = await self._gateway.ask(some_topics, self._cursor, TOPICS_PER_LOOK)
        return {*listed, *self._hinted, *(topic for topic, _ in self._pushers)}

    def _stop_pusher(self, pusher: Pusher) -> None:
        grace_s = self._gateway.settings.gateway_server.grace.total_seconds()
        pusher.stop_pulling()
        task = asyncio.create_task(pusher.stop(grace_s))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stop(self) -> None:
        for pusher in self._pushers.values():
            self._stop_pusher(pusher)
        self._pushers.clear()
        if self._stopping:
            await asyncio.wait(self._stopping)
        await self._poster.close()


__all__ = ["allowed_of", "check_settings", "reload_targets", "routes"]

_supervisors: WeakKeyDictionary[GatewayContext, PushSupervisor] = WeakKeyDictionary()


def allowed_of(gateway: GatewayContext) -> Allowed:
    """The addresses that pushes may connect to. Raises ConfigError if `push-allow` is invalid."""
    return Allowed.of(gateway.settings.gateway_server.push_allow)


async def reload_targets(gateway: GatewayContext, topic: str) -> None:
    """Reload a topic's targets immediately after a change made through this gateway."""
    if (supervisor := _supervisors.get(gateway)) is not None:
        await supervisor.reload(topic)


def check_settings(settings: GatewaySettings) -> None:
    """Raises ConfigError if `push-allow` is invalid, or the environment's certificates are.

    Certificates that the environment does not name are loaded at the first push.
    """
    Allowed.of(settings.gateway_server.push_allow)
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        certificates()


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """No routes, since the native API has them; only adds the service that pushes."""
    supervisor = _supervisors[gateway] = PushSupervisor(gateway, allowed_of(gateway))
    gateway.add_service(supervisor.run, "push")
    return []
