"""The backlog that a topic's ramp holds back, and how long its promotion takes."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from lisa.core.model.late import Ramp
from lisa.core.model.options import RAMP_LATE_MS
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store


class RampState(NamedTuple):
    """Messages of the backlog, and how long their promotion takes at the ramp's rate."""

    backlog: int
    lasts: timedelta


def ramp_state(store: Store, topic: str, ramp: Ramp, now_ms: int) -> Flow[RampState]:
    """The state of a topic's ramp; the fullest shard decides how long it takes."""
    layout = yield from store.layout(Topic(topic))
    shards = layout.active(Topic(topic))
    late_ms = now_ms - RAMP_LATE_MS
    commands = [("ZCOUNT", store.keys.topic(one).waiting, "-inf", late_ms) for one in shards]
    counts = yield from store.commands(commands)
    return RampState(sum(counts), ramp.share(layout.shards).lasts(max(counts)))
