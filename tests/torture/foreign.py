"""Damage that another program does to Redis, and how an operator repairs it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from lisa.core.model.envelope import decode_content
from lisa.core.model.errors import InvalidMessage
from tests.torture.stage import now_us
from tests.torture.world import TOPICS, place_number

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from tests.torture.plan import Fault
    from tests.torture.stage import Stage

TOLD = 20
LOOK_S = 0.1


class Repaired(NamedTuple):
    """The repaired topics: since when, and the findings by kind, some in words."""

    began: int
    kinds: dict[str, dict[str, int]]
    words: dict[str, list[str]]


def trim(stage: Stage, fault: Fault) -> dict[str, Any] | None:
    """Delete entries of a ready stream, unread or in flight: by XTRIM, or one by one by XDEL.

    None, here and below: there is nothing to do now.
    """
    topic, group, stream = _place(stage, fault.target)
    rows = _command(stage, "XRANGE", stream, "-", "+", "COUNT", fault.amount)
    entries = [entry.decode() for entry, _ in rows]
    numbers = _numbers_of(stage, topic, [fields[1] for _, fields in rows])
    if not numbers:
        return None
    if fault.amount % 2:
        stage.client.xdel(stream, *entries)
    else:
        ms, _, serial = entries[-1].partition("-")
        stage.client.execute_command("XTRIM", stream, "MINID", "=", f"{ms}-{int(serial) + 1}")
    return {"messages": numbers, "places": [place_number(topic, group)]}


def delete_bodies(stage: Stage, fault: Fault) -> dict[str, Any] | None:
    """Delete the bodies of waiting messages."""
    topic = fault.target
    keys = stage.store.keys.topic(topic)
    ids: list[bytes] = _command(stage, "ZRANDMEMBER", keys.waiting, fault.amount)
    if not ids:
        return None
    bodies = [keys.body(one.decode()) for one in ids]
    # Together: another message may replace one of them at any moment.
    both = stage.client.pipeline(transaction=True)
    both.mget(bodies)
    both.unlink(*bodies)
    numbers = numbers_in(both.execute()[0])
    return {"messages": numbers, "deleted": True} if numbers else None


def delete_consumer(stage: Stage, fault: Fault) -> dict[str, Any] | None:
    """Delete a consumer with its in-flight messages: XGROUP DELCONSUMER forgets them."""
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
    numbers = _numbers_of(stage, topic, ids)
    # Otherwise its messages had been handled, and none is missing.
    return {"messages": numbers, "places": [place_number(topic, group)]} if numbers else None


def destroy_group(stage: Stage, fault: Fault) -> dict[str, Any] | None:
    """Destroy the stream's group; all its in-flight messages are delivered again."""
    topic, group, stream = _place(stage, fault.target)
    if not stage.client.xgroup_destroy(stream, group):
        return None
    return {"places": [place_number(topic, group)], "redelivers": True}


def longest(stage: Stage, kind: str) -> str:
    """The topic, or the topic's group, that a kind of fault can damage most."""
    pipe, places = stage.client.pipeline(transaction=False), []
    for topic in TOPICS:
        keys = stage.store.keys.topic(topic.name)
        if kind == "delete-bodies":
            pipe.zcard(keys.waiting)
            places.append(topic.name)
            continue
        for group in topic.groups:
            stream = keys.group(group).ready
            if kind == "delete-consumer":
                pipe.xpending(stream, group)
            else:
                pipe.xlen(stream)
            places.append(f"{topic.name}/{group}")
    # Without its group, nothing is pending.
    return max(zip(map(_amount, pipe.execute(raise_on_error=False)), places, strict=True))[1]


def _amount(said: object) -> int:
    pending = said.get("pending", 0) if isinstance(said, dict) else said
    return pending if isinstance(pending, int) else 0


def repair(stage: Stage, topics: Sequence[str]) -> Generator[float, None, Repaired | None]:
    """Run `lisa fsck --repair` in a separate process: in this one it would block the proxy.

    Yields the pause until the next check. None: it failed.
    """
    began = now_us()
    out = stage.out / "logs" / f"fsck-{began}.json"  # two may be running
    command = ["fsck", *topics, "--repair", "--json", "--redis", stage.server.url]
    with out.open("wb") as said, (stage.out / "logs" / "fsck.log").open("ab") as log:
        one = stage.help([sys.executable, "-m", "lisa.cli.main", *command], said, log)
    while one.poll() is None:
        yield LOOK_S
    if one.returncode not in (0, 1):  # 1: some finding cannot be repaired
        return None
    kinds: dict[str, Counter[str]] = {topic: Counter() for topic in topics}
    words: dict[str, list[str]] = {topic: [] for topic in topics}
    for found in json.loads(out.read_bytes())["findings"]:
        kinds[found["topic"]][found["kind"]] += 1
        words[found["topic"]].append(" ".join(str(one) for one in found.values() if one))
    return Repaired(
        began,
        {topic: dict(some) for topic, some in kinds.items()},
        {topic: some[:TOLD] for topic, some in words.items()},
    )


def _numbers_of(stage: Stage, topic: str, ids: Iterable[bytes]) -> list[int]:
    keys = stage.store.keys.topic(topic)
    found = [keys.body(one.decode()) for one in ids]
    return numbers_in(_command(stage, "MGET", *found)) if found else []


def numbers_in(envelopes: Sequence[bytes | None]) -> list[int]:
    """The same for envelopes; missing ones have none."""
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
    """A command's raw reply."""
    return stage.store.ask(*words)
