"""Limits of keys: the topic's own shard has the valid ones, and every other shard a copy.

A later number of shards moves keys to other shards, so each shard has the limits of all keys.
`LimitKeys` numbers each change in the topic's own shard; a shard whose number is lower, or whose
copy was interrupted, gets what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

from lisa.core.model.sharding import KEY_END, Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import PAGE, START
from lisa.core.store.replies import pairs
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.topic import LimitKeys

DECLARED = "declared limits:"
"""Fields of a topic's options begin with this, and end with the key: the limits that a manager's
YAML wrote last."""

ARCHIVED = "limits:"
"""In archives, options of a topic begin with this, and end with the field of a key's limits."""

FIELD = "limits"
"""The field of a shard's options with the number of its latest change; `+` follows while it is
copied."""


def read(store: Store, shard: str, of_group: str | None = None) -> Flow[dict[str, str]]:
    """The encoded limits that a shard has, by field of the hash: a key, or a group and a key.

    of_group: only those of this group; by default all.
    """
    # The name of a group has no character with a meaning in patterns.
    only = () if of_group is None else ("MATCH", f"{of_group}{KEY_END}*")
    found: dict[str, str] = {}
    cursor = START
    while True:
        key = store.keys.topic(shard).limits
        cursor, page = yield from store.command("HSCAN", key, cursor, *only, "COUNT", PAGE)
        found |= {text(name): text(value) for name, value in pairs(page).items()}
        if cursor == START:
            return found


def restore(store: Store, topic: Topic, archived: Mapping[str, str]) -> Flow[None]:
    """Set the limits among archived options that the topic lacks. Raises LisaError."""
    there = yield from read(store, topic)
    own = {name[len(ARCHIVED) :]: archived[name] for name in archived if name.startswith(ARCHIVED)}
    lacking = [(name, value) for name, value in own.items() if name not in there]
    for page in chunks(lacking, PAGE):
        yield from store.run(LimitKeys(topic, "set", dict(page)))


def copy(
    store: Store, topic: Topic, own: Mapping[str, str], shards: Mapping[Shard, Mapping[str, str]]
) -> Flow[None]:
    """Copy a topic's limits to the shards that lack its latest change. Raises LisaError.

    own, shards: the options hashes of the topic's own shard and of the others.
    """
    number = int(own.get(FIELD, "0"))
    for shard, options in shards.items():
        known = options.get(FIELD, "0")
        # A shard has a higher number if the topic's own shard lost changes with its server.
        is_behind = int(known.rstrip("+")) < number or "+" in known
        if is_behind and (yield from store.run(LimitKeys(shard, "open", {}, number))) == 0:
            yield from _copy(store, topic, shard, number)


def _copy(store: Store, topic: Topic, shard: Shard, number: int) -> Flow[None]:
    """Copy what differs; the calls change nothing once the copy of a later change has begun."""
    wanted = yield from read(store, topic)
    there = yield from read(store, shard)
    changes = dict.fromkeys(there.keys() - wanted.keys(), "") | dict(wanted.items() - there.items())
    *pages, last = [*chunks(list(changes.items()), PAGE)] or [[]]
    for page in pages:
        yield from store.run(LimitKeys(shard, "copy", dict(page), number))
    yield from store.run(LimitKeys(shard, "close", dict(last), number))
