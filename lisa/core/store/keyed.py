"""Reads the lists of ids that belong to a key; lua/prelude/keyed.lua describes and writes them."""

from __future__ import annotations

from typing import NamedTuple

from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import KEY_END, Shard
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store


class KeyPart(NamedTuple):
    """One part of a key's list.

    number, parts: which of how many parts, from 1. ids: whole ids. total: ids in the whole list.
    stored: the part as the server has it.
    """

    number: int
    parts: int
    ids: list[str]
    total: int
    stored: bytes


def read_part(store: Store, shard: Shard, key: str, number: int = 1) -> Flow[KeyPart]:
    """One part of the list of a key's live ids, in no particular order. Raises LisaError.

    A later part is read with the number after this one's, up to `parts`. New parts come at the end,
    and take ids of earlier ones with them: reading all parts in order misses no id that was there
    all the time.
    """
    field = key if number == 1 else f"{key}{KEY_END}{number}"
    keyed = store.keys.topic(shard).keyed
    head, stored = yield from store.command("HMGET", keyed, f"{key}{KEY_END}", field)
    stored = stored or b""
    own_ids = stored.decode().split(KEY_END)[:-1]
    parts, total = map(int, head.split()) if head else (1, len(own_ids))
    return KeyPart(number, parts, [keyed_id(key, own) for own in own_ids], total, stored)
