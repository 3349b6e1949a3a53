"""Running a transition, without a server."""

from __future__ import annotations

from datetime import timedelta

import redis

from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.flow import Execute
from lisa.core.keys import Keys
from lisa.core.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim


def test_a_long_outage_is_waited_for_without_growing() -> None:
    """Of a long patience there may be thousands of tries."""
    address = Address("redis://localhost:1/0")
    flow = SyncStore(Connection(address), Keys(), timedelta(hours=1)).run(Reclaim("orders", "lisa"))
    step = next(flow)
    for _ in range(5000):
        away = redis.ConnectionError("away")
        step = flow.throw(away) if isinstance(step, Execute) else flow.send(None)
