"""The capacity model: the primaries, shards and consumers that a load needs.

Redis runs one command at a time, so a primary's capacity is the inverse of the CPU time that a
message costs there. This time falls with the load, because the calls at higher rates hold more
messages. docs/why/scale.md derives the formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from redis.crc import key_slot

from lisa.cli.size.costs import BODY_BYTES, Costs
from lisa.cli.size.simulation import MOST, PROMOTE, Load
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import MOST_SHARDS, Topic, name
from lisa.manager.promoter import FAST_INTERVAL_S, FAST_RATE

SLOTS = 16_384
MANAGERS = 2
"""One works, the other is its standby. Both promote due messages, so every second call is empty."""

SPARE_MEMORY = 1.25
"""Memory including fragmentation, replication buffers and streams, per byte of messages."""

ENVELOPE_BYTES = 200
"""Bytes on the wire per message in addition to its body, in each direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakLoad:
    """A load at its peak.

    rate: messages sent, and due, per second. body: its mean size in bytes. waiting: messages.
    batch: messages in a send call. retention_s: how long tombstones stay. round_trip_us: of the
    network. busy: the largest share of its core that a Redis or a consumer may use. memory: bytes
    of a primary.
    """

    topic: Topic
    rate: float
    body: int
    waiting: float
    batch: int
    groups: int
    retention_s: float
    round_trip_us: float
    busy: float
    memory: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a topic's shards. most: shards on the primary with the most shards."""

    primaries: int
    shards: int
    most: int

    @property
    def share(self) -> float:
        """The busiest primary's share of the messages."""
        return self.most / self.shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The cluster for a peak load. Shares are of one core.

    redis: used on the busiest primary. managers: processes, one of them a standby. manager: used
    by each. consumers: processes of each group. memory, inbound, outbound: bytes, and bytes per
    second, of the busiest primary. drain: messages per second of the whole cluster that are due at
    one instant. load: of the busiest primary.
    """

    placement: Placement
    redis: float
    managers: int
    manager: float
    consumers: int
    memory: float
    inbound: float
    outbound: float
    drain: float
    load: Load


def size(peak: PeakLoad, costs: Costs) -> Size:
    """The smallest cluster for a peak load. Raises ConfigError if one topic cannot carry it."""
    for placement in placements(peak.topic):
        found = _sized(peak, costs, placement)
        if found.redis <= peak.busy and found.memory <= peak.memory:
            return found
    raise ConfigError(
        f"one topic has at most {MOST_SHARDS} shards, too few for this load: spread it over several"
        " topics, and size each on its own"
    )


def sized(peak: PeakLoad, costs: Costs, primaries: int) -> Size:
    """The size with a given number of primaries, even if they are too few."""
    return _sized(peak, costs, best_placement(peak.topic, primaries))


def _sized(peak: PeakLoad, costs: Costs, placement: Placement) -> Size:
    rate = peak.rate * placement.share
    load = _load(peak, costs, placement)
    while load.rate / load.shards > peak.busy * load.readers * reader_rate(load, costs):
        load = replace(load, readers=load.readers + 1)
    consumer_us = costs.consumer_message + costs.consumer_call / read_batch(load, costs)
    consumers = max(load.readers, ceil(peak.rate * consumer_us / 1e6 / peak.busy))
    manager_us = costs.manager_message + costs.manager_call / promote_batch(load, costs)
    managing = peak.rate * manager_us / 1e6
    managers = max(MANAGERS, ceil(managing / peak.busy) + 1)
    kept = peak.waiting * (costs.waiting + peak.body)
    kept += peak.rate * peak.retention_s * costs.tombstone
    wire = rate * (peak.body + ENVELOPE_BYTES)
    return Size(
        placement=placement,
        redis=rate * redis_us(load, costs) / 1e6,
        managers=managers,
        manager=managing / (managers - 1),
        consumers=consumers,
        memory=kept * placement.share * SPARE_MEMORY,
        inbound=wire,
        outbound=wire * peak.groups,
        drain=_drain(load, costs, consumers, placement),
        load=load,
    )


def _load(peak: PeakLoad, costs: Costs, placement: Placement) -> Load:
    """The load of the busiest primary."""
    rate = peak.rate * placement.share
    fast_us = FAST_INTERVAL_S * 1e6 if rate / placement.most > FAST_RATE else 0.0
    kilobytes = max(0, peak.body - BODY_BYTES) / 1000
    return Load(
        rate=rate,
        batch=peak.batch,
        shards=placement.most,
        managers=MANAGERS,
        round_trip_us=peak.round_trip_us,
        # One core of a manager serves all shards in turn.
        interval_us=max(fast_us, costs.manager_call * placement.shards),
        groups=peak.groups,
        # A body is written once and read by each group, at about half of its cost each.
        body_us=costs.kilobyte * kilobytes * (1 + peak.groups) / 2,
    )


def promote_batch(load: Load, costs: Costs) -> float:
    """The mean number of messages in a promotion."""
    rate = load.rate / load.shards / 1e6
    # Messages that fall due during the call for the first one.
    joined = rate * (load.round_trip_us + costs.manager_call) / 2
    cycle_us = load.round_trip_us + costs.manager_call + PROMOTE * costs.life_call
    return min(MOST, max(1.0 + joined, rate * max(cycle_us, load.interval_us)))


def read_batch(load: Load, costs: Costs) -> float:
    """The mean number of messages that a consumer reads, opens and settles together."""
    rate = load.rate / load.shards / load.readers / 1e6
    message_us = costs.consumer_message + (1 - PROMOTE) * (costs.life_message + load.body_us)
    idle = max(1 / MOST, 1 - rate * message_us)
    joined = rate * (2 * load.round_trip_us + costs.consumer_call) / idle
    return min(MOST, max(joined, promote_batch(load, costs)))


def reader_rate(load: Load, costs: Costs) -> float:
    """The most messages per second that one consumer process handles from one shard."""
    redis_us = (1 - PROMOTE) * (costs.life_call + MOST * (costs.life_message + load.body_us))
    cycle_us = 2 * load.round_trip_us + costs.consumer_call + MOST * costs.consumer_message
    return MOST * 1e6 / (cycle_us + redis_us)


def redis_us(load: Load, costs: Costs) -> float:
    """Redis's CPU time per message, from the send to the ack."""
    sent = costs.send_message + costs.send_call / min(load.batch, MOST)
    promoted = load.managers * PROMOTE * costs.life_call / promote_batch(load, costs)
    read = (1 - PROMOTE) * costs.life_call / read_batch(load, costs)
    return sent + load.groups * (costs.life_message + promoted + read) + load.body_us


def _drain(load: Load, costs: Costs, consumers: int, placement: Placement) -> float:
    """Messages per second of the whole cluster if all are due at one instant."""
    lives_us = load.groups * (costs.life_message + costs.life_call / MOST) + load.body_us
    consumer_us = costs.consumer_message + costs.consumer_call / MOST
    primary = min(1e6 / lives_us, load.shards * load.readers * reader_rate(load, costs))
    return min(primary / placement.share, consumers * 1e6 / consumer_us)


def placements(topic: Topic) -> Iterator[Placement]:
    """The best placement for each number of primaries, up to the number that one topic can use.

    Two primaries are left out, because Redis Cluster needs three.
    """
    yield Placement(1, 1, 1)
    for primaries in range(3, MOST_SHARDS + 1):
        yield best_placement(topic, primaries)


@cache
def best_placement(topic: Topic, primaries: int) -> Placement:
    """The number of shards with which a topic's busiest primary has the smallest share.

    Primaries own equal ranges of slots, as `redis-cli --cluster create` and `rebalance` leave them.
    """
    if primaries == 1:
        return Placement(1, 1, 1)
    found = []
    for shards in range(1, MOST_SHARDS + 1):
        slots = (key_slot(name(topic, number, shards).encode()) for number in range(shards))
        owners = Counter(slot * primaries // SLOTS for slot in slots)
        found.append(Placement(primaries, shards, max(owners.values())))
    return min(found, key=lambda placement: (placement.share, placement.shards))
