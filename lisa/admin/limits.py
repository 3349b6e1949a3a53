"""Limits of single keys, in place of those of their topic."""

from __future__ import annotations

from typing import NamedTuple

from lisa.admin.messages import selected_groups
from lisa.core.model.errors import ConfigError
from lisa.core.model.lanes import KeyLimits, limits_field
from lisa.core.model.sharding import KEY_END, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store import limits
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store
from lisa.core.transitions.topic import LimitKeys


class LimitedKey(NamedTuple):
    """A key with limits of its own. group: the only group to which they apply; None: to all."""

    key: str
    group: str | None
    limits: KeyLimits


class LimitsPage(NamedTuple):
    """A page of keys with limits of their own; `cursor` is None on the last page."""

    keys: tuple[LimitedKey, ...]
    cursor: str | None


def set_limits(
    store: Store, topic: str, key: str, given: KeyLimits, group: str | None = None
) -> Flow[bool]:
    """Replace the limits of a key; `KeyLimits()` removes them. Returns whether they changed.

    group: the limits apply to this group only, and take precedence over those for all groups.
    Raises GroupRemoved if it is not declared.
    """
    yield from selected_groups(store, topic, group)
    yield from store.register([topic])
    field = limits_field(key, group)
    changed = yield from store.run(LimitKeys(topic, "set", {field: given.encode()}))
    yield from spread(store, Topic(topic))
    return changed > 0


def limits_of(store: Store, topic: str, key: str, group: str | None = None) -> Flow[KeyLimits]:
    """The limits of a key, for all groups or for one."""
    field = limits_field(key, group)
    stored = yield from store.command("HGET", store.keys.topic(topic).limits, field)
    return _decoded(field, (stored or b"").decode())


def limited_keys(
    store: Store, topic: str, *, cursor: str | None = None, limit: int = 100
) -> Flow[LimitsPage]:
    """Up to `limit` keys with limits of their own, sorted by group and key.

    cursor: that of the page before.
    """
    stored = yield from limits.read(store, topic)
    after, _, key = (cursor or "").partition("/")
    left = sorted(one for one in map(_split, stored) if cursor is None or one > (after, key))
    shown = tuple(
        LimitedKey(key, group or None, _decoded(field, stored[field]))
        for group, key in left[:limit]
        for field in [limits_field(key, group)]
    )
    return LimitsPage(shown, "/".join(left[limit - 1]) if len(left) > limit else None)


def _split(field: str) -> tuple[str, str]:
    """The group, empty for all groups, and the key of a field."""
    group, has_group, key = field.partition(KEY_END)
    return (group, key) if has_group else ("", field)


def _decoded(field: str, stored: str) -> KeyLimits:
    try:
        return KeyLimits.decode(stored)
    except ValueError:
        raise ConfigError(
            f"the stored limits of key {field!r} are unreadable: {stored!r}; set them again"
        ) from None
