"""Messages row by row, for readable tests; the enqueue script takes them by columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate


class Item(NamedTuple):
    """One message to send: `due` is '+<ms>' for a delay, otherwise epoch ms in decimal."""

    id: str
    due: str
    envelope: bytes
    ttl_ms: int | None = None
    policy: str | None = None


def enqueue(
    topic: str,
    token: str,
    items: Sequence[Item],
    on_duplicate: OnDuplicate = OnDuplicate.KEEP,
    *,
    are_ids_new: bool = False,
    window: str | None = "",
) -> Enqueue:
    """The call that sends the items, all with one send token."""
    ids, dues, envelopes, ttls_ms, policies = zip(*items, strict=True)
    sent = [envelope[:1] + token.encode() + envelope[9:] for envelope in envelopes]
    return Enqueue(topic, ids, dues, sent, ttls_ms, policies, on_duplicate, are_ids_new, window)


class Burst(NamedTuple):
    """One coalescing send; its rule is as in the header of lua/coalesce.lua."""

    key: str
    rule: str
    envelope: bytes
    ttl_ms: int | None = None
    policy: str | None = None


def coalesce(topic: str, token: str, items: Sequence[Burst], **options: Any) -> Coalesce:
    """The call that sends the items."""
    keys, rules, envelopes, ttls_ms, policies = zip(*items, strict=True)
    return Coalesce(topic, token, keys, rules, envelopes, ttls_ms, policies, **options)
