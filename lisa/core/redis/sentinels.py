"""Sentinel clients that ask all sentinels in parallel and use the latest configuration.

redis-py's own client uses the first answer; a partitioned sentinel would send clients back to a
former primary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import MasterNotFoundError, Sentinel

from lisa.core.redis.errors import passes
from lisa.core.redis.parallel import OTHERS_S, ask_together
from lisa.core.redis.tls import share_contexts
from lisa.core.redis.topology import NodeAddress

_State = Mapping[str, Any]


class _LatestEpoch:
    """Chooses the primary from all answers. Only a majority may return to an earlier epoch."""

    _epoch = -1

    def __init__(self: Any, hosts: Sequence[NodeAddress], **keywords: Any) -> None:
        super().__init__(hosts, **keywords)  # type: ignore[call-arg]  # redis-py's client
        for sentinel in self.sentinels:
            share_contexts(sentinel)

    def _chosen(self: Any, service: str, answers: Sequence[Any]) -> tuple[str, int]:
        states: list[_State] = [
            answer[service]
            for answer in answers
            if not isinstance(answer, BaseException) and service in answer
        ]
        latest = max((state["config-epoch"] for state in states), default=-1)
        if latest >= self._epoch or 2 * len(states) > len(self.sentinels):
            for state in states:
                if state["config-epoch"] == latest and self.check_master_state(state, service):
                    self._epoch = latest
                    return state["ip"], state["port"]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and not states and not any(map(passes, errors)):
            raise errors[0]  # a wrong password, or servers that are no sentinels
        why = "no usable primary" if states else "no Sentinel knows a service of this name"
        shown = "; ".join([why, *map(str, errors)])
        raise MasterNotFoundError(f"service {service!r}: {shown}")


class Sentinels(_LatestEpoch, Sentinel):
    """Blocking Sentinel client."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address. Raises MasterNotFoundError."""
        answers = ask_together(list(self.sentinels), lambda one: one.sentinel_masters())
        return self._chosen(service_name, answers)


class AsyncSentinels(_LatestEpoch, AsyncSentinel):
    """Asyncio Sentinel client."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address. Raises MasterNotFoundError."""
        waiting = {asyncio.ensure_future(one.sentinel_masters()) for one in self.sentinels}
        done: set[asyncio.Future[Any]] = set()
        within_s: float | None = None  # each request has its own timeout
        try:
            while waiting:
                some, waiting = await asyncio.wait(
                    waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
                )
                done |= some
                if not some:
                    break
                if any(one.exception() is None for one in some):
                    within_s = OTHERS_S
        finally:
            for one in waiting:
                one.cancel()
        return self._chosen(service_name, [one.exception() or one.result() for one in done])
