"""Running a transition, without a server."""

from __future__ import annotations

from datetime import timedelta

import redis

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Execute
from lisa.core.store.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim


def test_a_long_outage_does_not_grow_the_stack() -> None:
    """A long patience can take thousands of attempts."""
    address = Address("redis://localhost:1/0")
    flow = SyncStore(Connection(address), Keys(), timedelta(hours=1)).run(Reclaim("orders", "lisa"))
    step = next(flow)
    for _ in range(5000):
        away = redis.ConnectionError("away")
        step = flow.throw(away) if isinstance(step, Execute) else flow.send(None)
