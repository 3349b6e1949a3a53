"""Renders a topic as keys: every key, its type, its value, and its expiry time."""

from collections.abc import Iterable, Mapping
from typing import Any

from lisa.core.model.sharding import KEY_END
from tests.model.topic import Group, Tombstone, Topic
from tests.model.unknowns import EntryId, Instant, LateReason

NEVER = -1
EMPTY = "0-0"


def render(topic: Topic) -> dict[str, tuple[str, Any, Any]]:
    """All keys of one topic. They share a hash tag; empty ones do not exist."""
    root = f"lisa:{{{topic.name}}}:"
    keys: dict[str, tuple[str, Any, Any]] = {}

    def put(name: str, kind: str, value: Any, ends: Any = NEVER) -> None:
        if value:
            keys[root + name] = (kind, value, ends)

    put("waiting", "zset", topic.waiting)
    put("expiry", "zset", topic.expiry)
    put("policy", "hash", topic.policy)
    put("schedules", "hash", topic.schedules)
    put("ticks", "zset", topic.ticks)
    put("options", "hash", texts(topic.options))
    put("consumers", "hash", topic.alive)
    put("stats", "hash", texts(topic.stats))
    put("keyed", "hash", keyed(topic.live))
    put("groups", "hash", texts(topic.declared))
    for id_, message in topic.live.items():
        put(f"body:{id_}", "string", message.envelope)
    for id_, stone in topic.tombstones.items():
        put(f"done:{id_}", "tombstone", tombstone(stone), stone.ends)
    if topic.events:
        entries = [[name, texts(event)] for name, event in topic.events]
        put("events", "stream", {"entries": entries, "groups": {}})
    for group in topic.all_groups.values():
        at = f"g:{group.name}:"
        put(at + "ready", "stream", stream(group))
        put(at + "entries", "hash", {one.id: one.name for one in group.stream if one.is_ours})
        for name in ("retry", "garbage", "leases"):
            put(at + name, "zset", getattr(group, name))
        put(at + "attempts", "hash", texts(group.attempts))
        put(at + "reasons", "hash", group.reasons)
    return keys


def keyed(ids: Iterable[str]) -> dict[str, str]:
    """The lists of the keys of live messages; these are short, so each has one part."""
    lists: dict[str, list[str]] = {}
    for id_ in sorted(ids):
        key, end, own_id = id_.partition(KEY_END)
        if end:
            lists.setdefault(key, []).append(own_id + KEY_END)
    return {key: "".join(own_ids) for key, own_ids in lists.items()}


def texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as in a hash: text, except for those that only the server knows."""
    unknown = (Instant, LateReason)
    return {k: v if isinstance(v, unknown) else str(v) for k, v in values.items()}


def tombstone(stone: Tombstone) -> list[Any]:
    due = "" if stone.due is None else stone.due
    head = f"{stone.token}{stone.mark}{stone.state}"
    return [head, *texts({"due": due, "attempts": stone.attempts, "at": stone.at}).values()]


def stream(group: Group) -> dict[str, Any]:
    entries = []
    for entry in group.stream:
        fields: dict[str, Any] = {"id": entry.id, "due": entry.due}
        if entry.attempt > 1 or entry.is_suspect:
            fields["attempt"] = entry.attempt
        if entry.is_suspect:
            fields["suspect"] = 1
        entries.append([entry.name, texts(fields)])
    last: EntryId | str = group.given.name if group.given else EMPTY
    pending = [[one.name, one.holder, one.since, one.times] for one in group.pending]
    its = {
        "name": group.name,
        "last": last,
        "pending": pending,
        "consumers": sorted(group.consumers),
    }
    return {"entries": entries, "groups": {group.name: its}}
