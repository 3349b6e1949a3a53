"""Whether servers refuse writes, and why: the cause of most other symptoms.

While a server refuses writes, no role can renew its heartbeat there. A role without a heartbeat is
then not known to have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.redis import errors
from lisa.core.redis.errors import Refusal
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store

NO_HEARTBEATS = "unknown: heartbeats cannot be written while the server refuses writes"


def write_refusals(store: Store, keys: Sequence[str]) -> Flow[list[Refusal | None]]:
    """Why the servers that hold these keys refuse writes; None where writes are accepted.

    Tries a write that changes nothing, of the kind that a full server refuses first. A user who may
    not write gets None. Raises LisaError if a server does not answer.
    """
    asked = keys if store.has_nodes else keys[:1]
    replies = yield from store.commands_once([("ZADD", key, "XX", 0, "") for key in asked])
    found = [errors.refusal_of(one) if isinstance(one, Exception) else None for one in replies]
    return found if store.has_nodes else found * len(keys)


def write_refusal(store: Store, key: str) -> Flow[Refusal | None]:
    """Why the server that holds a key refuses writes; None if it accepts them."""
    (found,) = yield from write_refusals(store, [key])
    return found
