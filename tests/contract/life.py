"""The whole life of three messages as one flow, for any store and connection."""

from typing import Any

from lisa.core.model.envelope import decode_envelope, fence_of
from lisa.core.model.stream import parse_entry
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store.store import Store
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.change import Cancel, Cancelled
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect
from tests.contract.bench import TOPIC, item
from tests.rows import enqueue

EXPECTED: dict[str, Any] = {
    "sent": [Sent.ACCEPTED] * 3,
    "taken": ["a", "b"],
    "bodies": [b"one", b"two"],
    "acked": [Acked.ACKED] * 2,
    "cancelled": [Cancelled.CANCELLED],
    "left": ["acked", "acked", "cancelled"],
    "stats": {"sent": 3, "promoted": 2, "acked@lisa": 2, "cancelled": 1},
    "topics": [TOPIC],
}


def life(store: Store) -> Flow[dict[str, Any]]:
    """Send three messages, read and settle two, cancel the third. Returns each step's answer."""
    found: dict[str, Any] = {}
    yield from store.check_schema()
    while not (yield from store.register([TOPIC])):  # it does not wait for a slow node of a cluster
        yield Pause(0.05)
    yield from store.run(Declare(TOPIC, "lisa"))
    batch = [item("a", "1", "one"), item("b", "2", "two"), item("c", "+60000")]
    found["sent"] = yield from store.run(enqueue(TOPIC, "A" * 8, batch))
    # Deliveries of a lost reply stay in flight; the index has their receipts.
    yield from store.run(Pull(TOPIC, "lisa", "c1", 10))
    seen = yield from store.run(Inspect(TOPIC, ["a", "b"]))
    entries = [one.group_states[0].entry for one in seen]
    stream = store.keys.topic(TOPIC).group("lisa").ready
    read = yield from store.command("XRANGE", stream, "-", "+", "COUNT", 10)
    found["taken"] = [flat[1].decode() for _, flat in read]
    opened = yield from store.run(Open(TOPIC, "lisa", [parse_entry(one) for one in read]))
    envelopes = [data or b"" for data in opened.envelopes]
    found["bodies"] = [decode_envelope(data).body for data in envelopes]
    settlements = [
        Settlement(message_id, entry or "", fence_of(data), due, 1)
        for message_id, entry, data, due in zip("ab", entries, envelopes, (1, 2), strict=True)
    ]
    found["acked"] = yield from store.run(Ack(TOPIC, "lisa", settlements))
    found["cancelled"] = yield from store.run(Cancel(TOPIC, ["c"]))
    left = yield from store.run(Inspect(TOPIC, ["a", "b", "c"]))
    found["left"] = [one.tombstone.state for one in left if one.tombstone]
    found["stats"] = yield from store.stats(TOPIC)
    found["topics"] = yield from store.topics()
    return found
