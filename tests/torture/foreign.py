"""What a foreign hand does to Redis behind Lisa's back, and how an operator repairs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lisa.admin.fsck import check
from lisa.core.envelope import decode_content
from lisa.core.errors import InvalidMessage
from tests.torture.world import place_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.torture.plan import Fault
    from tests.torture.stage import Stage

__all__ = ["delete_bodies", "delete_consumer", "destroy_group", "numbers_in", "repair", "trim"]


def trim(stage: Stage, fault: Fault) -> dict[str, Any]:
    """Entries of a ready stream, unread and in flight alike: by XTRIM, or one by one by XDEL."""
    topic, group, stream = _place(stage, fault.target)
    rows = _command(stage, "XRANGE", stream, "-", "+", "COUNT", fault.amount)
    entries = [entry.decode() for entry, _ in rows]
    numbers = _numbers_of(stage, topic, [fields[1] for _, fields in rows])
    if entries and fault.amount % 2:
        stage.client.xdel(stream, *entries)
    elif entries:
        ms, _, serial = entries[-1].partition("-")
        stage.client.execute_command("XTRIM", stream, "MINID", "=", f"{ms}-{int(serial) + 1}")
    return {"messages": numbers, "places": [place_number(topic, group)]}


def delete_bodies(stage: Stage, fault: Fault) -> dict[str, Any]:
    """Bodies of messages that wait."""
    topic = fault.target
    keys = stage.store.keys.topic(topic)
    ids: list[bytes] = _command(stage, "ZRANDMEMBER", keys.waiting, fault.amount)
    if not ids:
        return {}
    bodies = [keys.body(one.decode()) for one in ids]
    # Together: another message may take the place of one of them at any moment.
    both = stage.client.pipeline(transaction=True)
    both.mget(bodies)
    both.unlink(*bodies)
    return {"messages": numbers_in(both.execute()[0]), "deleted": True}


def delete_consumer(stage: Stage, fault: Fault) -> dict[str, Any]:
    """A consumer's name, with what it had in flight: XGROUP DELCONSUMER forgets all of that."""
    topic, group, stream = _place(stage, fault.target)
    found: list[dict[str, Any]] = []
    for row in _command(stage, "XINFO", "CONSUMERS", stream, group):
        fields = dict(zip(row[::2], row[1::2], strict=True))
        if fields[b"pending"]:
            both = stage.client.pipeline(transaction=True)
            both.xpending_range(stream, group, "-", "+", 10_000, fields[b"name"])
            both.xgroup_delconsumer(stream, group, fields[b"name"])
            found = both.execute()[0]
            break
    held = [row["message_id"] for row in found]
    entries = [_command(stage, "XRANGE", stream, one, one) for one in held]
    ids = [one[0][1][1] for one in entries if one]
    return {"messages": _numbers_of(stage, topic, ids), "places": [place_number(topic, group)]}


def destroy_group(stage: Stage, fault: Fault) -> dict[str, Any]:
    """The stream's group, its pending list with it. All that is in flight is delivered again."""
    topic, group, stream = _place(stage, fault.target)
    stage.client.xgroup_destroy(stream, group)
    return {"places": [place_number(topic, group)], "redelivers": True}


def repair(stage: Stage, topic: str) -> dict[str, int]:
    """What `lisa fsck --repair` does for a topic; what it found, by kind."""
    return dict(stage.store.drive(check(stage.store, [topic], repair=True)).kinds)


def _numbers_of(stage: Stage, topic: str, ids: Iterable[bytes]) -> list[int]:
    keys = stage.store.keys.topic(topic)
    found = [keys.body(one.decode()) for one in ids]
    return numbers_in(_command(stage, "MGET", *found)) if found else []


def numbers_in(envelopes: Sequence[bytes | None]) -> list[int]:
    """The same of envelopes; those that are gone have none."""
    numbers = []
    for data in envelopes:
        if data is None:
            continue
        try:
            body, _ = decode_content(data)
        except InvalidMessage:
            continue
        numbers.append(int(body[0]))
    return numbers


def _place(stage: Stage, target: str) -> tuple[str, str, str]:
    topic, _, group = target.partition("/")
    return topic, group, stage.store.keys.topic(topic).group(group).ready


def _command(stage: Stage, *words: Any) -> Any:
    """A reply as it came over the wire."""
    return stage.store.ask(*words)
