"""Records in Redis of running actions on garbage, so that every gateway sees them.

The record of a topic's run expires unless the process that runs it renews the record. A request to
stop the run is a separate key, which no renewal overwrites; when the run ends, its process replaces
the value with the number of affected messages.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store

LEASE_S = 10.0
"""How long a record lasts without renewal. Until then, its topic accepts no other run."""

STOP_S = 3 * LEASE_S
"""How long a request to stop lasts: longer than the record."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running action.

    run: unique name, which begins with the name of the gateway process. rate: at most this many
    messages per second; None: as fast as possible.
    """

    run: str
    verb: str
    total: int
    rate: int | None = None
    done: int = 0


def read(store: Store, topic: str) -> Flow[RunRecord | None]:
    """The record of a topic's running action."""
    return _decoded((yield from store.command("GET", store.keys.topic(topic).run)))


def claim(store: Store, topic: str, record: RunRecord) -> Flow[bool]:
    """Write the record of a new run; False if another one runs on the topic."""
    key, content = store.keys.topic(topic).run, msgspec.json.encode(record)
    if (yield from store.command("SET", key, content, "NX", "PX", _ms(LEASE_S))):
        return True
    # After a lost reply, the repeated command finds the record that the first one wrote.
    found = yield from read(store, topic)
    return found is not None and found.run == record.run


def renew(store: Store, topic: str, record: RunRecord) -> Flow[bool]:
    """Write the record again; returns whether the run has been asked to stop."""
    keys, content = store.keys.topic(topic), msgspec.json.encode(record)
    write = ("SET", keys.run, content, "PX", _ms(LEASE_S))
    _, is_asked = yield from store.commands([write, ("EXISTS", keys.run_stop(record.run))])
    return bool(is_asked)


def release(store: Store, topic: str, record: RunRecord) -> Flow[None]:
    """Delete the record of a run that has ended, after answering a request to stop it."""
    keys = store.keys.topic(topic)
    answer = ("SET", keys.run_stop(record.run), record.done, "XX", "PX", _ms(STOP_S))
    yield from store.commands([answer, ("DEL", keys.run)])


def ask_to_stop(store: Store, topic: str, run: str) -> Flow[None]:
    """Ask the process that runs an action to stop it."""
    key = store.keys.topic(topic).run_stop(run)
    yield from store.command("SET", key, "", "NX", "PX", _ms(STOP_S))


def progress(store: Store, topic: str, known: RunRecord) -> Flow[tuple[bool, int]]:
    """Whether a run that was asked to stop has ended, and how many messages it has affected.

    If its process did not answer, that is the number in `known`, the last known record.
    """
    keys = store.keys.topic(topic)
    asked = [("GET", keys.run), ("GET", keys.run_stop(known.run))]
    content, answer = yield from store.commands(asked)
    found = _decoded(content)
    if found is not None and found.run == known.run:
        return False, found.done
    return True, int(answer) if answer else known.done


def _decoded(content: Any) -> RunRecord | None:
    if content is not None:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(content, type=RunRecord)
    return None


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
