"""Presence records: roles announce themselves and renew the record regularly.

A record is JSON in a hash, under the role's unique name. Times are from Redis's clock.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from lisa.core.model.clock import duration_ms, human
from lisa.core.model.errors import LisaError
from lisa.core.model.options import HANDLER_SUFFIX
from lisa.core.redis import errors
from lisa.core.redis.errors import Refusal
from lisa.core.redis.flow import Aside, Command, Flow, any_runs
from lisa.core.store.replies import microseconds, pairs
from lisa.core.store.store import Store

BEAT = timedelta(seconds=5)
"""How often a role renews its record."""

GONE_AFTER = timedelta(seconds=30)
"""A role that has not renewed its record for this long counts as gone."""

GONE_AFTER_MS = duration_ms(GONE_AFTER)

SEPARATOR = ", "
"""Separates the groups of a record."""

BUSY_MS = duration_ms(timedelta(minutes=1))
"""A consumer whose handlers have all worked on the same messages for this long is busy."""

PROBE = "lisa.doctor"
"""The topic on whose keys checks of a server try what they need."""

PROBED = 64
"""Keys that together are on every primary of a cluster."""

NO_HEARTBEATS = "unknown: heartbeats cannot be written while the server refuses writes"
"""What is known of roles without a heartbeat then; they may be running."""


class PushPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a gateway's pushes of one group go.

    host: the target, without the path, which may be a secret.
    state: running, degraded, or waiting (as the target asked).
    failed: pushes that failed in a row, for `failing_ms`; `error` is the reason of the last one.
    """

    group: str
    host: str
    state: str = "running"
    failed: int = 0
    failing_ms: int = 0
    error: str = ""


class ConsumerPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One consumer on one topic.

    `group` is empty while no group is declared. A gateway names all groups that clients pull from.

    error: why the last message failed, if messages have failed in a row, for `failing_ms`.
    busy_ms: how long all handlers have been busy with the same messages.
    """

    name: str
    topic: str
    group: str = ""
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    concurrency: int = 1
    running: int = 0
    held: int = 0
    handled: int = 0
    state: str = "running"
    """running, waiting (for a group), paused, degraded or stopping."""
    error: str = ""
    failing_ms: int = 0
    busy_ms: int = 0
    pushes: tuple[PushPresence, ...] = ()

    @property
    def groups(self) -> list[str]:
        """The names in `group`."""
        return self.group.split(SEPARATOR)

    @property
    def condition(self) -> str:
        """The state in one word; unlike `state`, it tells failing pushes and busy handlers."""
        if self.state != "running":
            return self.state
        pushes = {push.state for push in self.pushes if push.failing_ms}
        if pushes:
            return "failing" if "running" in pushes else "waiting"
        return "busy" if self.busy_ms >= BUSY_MS else "running"


class ManagerPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One manager."""

    name: str
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    topics: int = 0


class RelayPresence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One relay, and how it last saw its table.

    table: its name, after the database's URL without user and password.
    backlog: rows that wait, the oldest for `age_ms`. set_aside: rows that can never be sent.
    error: what its last round failed with.
    """

    name: str
    host: str = ""
    pid: int = 0
    started_ms: int = 0
    seen_ms: int = 0
    table: str = ""
    backlog: int = 0
    age_ms: int = 0
    set_aside: int = 0
    error: str = ""


class LoaderRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last successful run of a loader, `lisa pipeline schedule --due-within`.

    Before any success, the first run: it has loaded nothing, so that `until_ms` is `floor_ms`.

    topic: empty if each row names its own. seen_ms: when the run began. horizon_ms: how far ahead
    it loads rows. floor_ms: rows that were due before this time are never loaded. until_ms: all
    later ones that are due until this time have been loaded.
    """

    name: str
    topic: str = ""
    seen_ms: int
    horizon_ms: int
    floor_ms: int
    until_ms: int

    @property
    def has_succeeded(self) -> bool:
        """Whether a run has succeeded."""
        return self.until_ms != self.floor_ms

    def is_late(self, now_ms: int) -> bool:
        """Whether half the horizon has passed since that run."""
        return now_ms - self.seen_ms > self.horizon_ms // 2


_P = TypeVar("_P", ConsumerPresence, ManagerPresence, RelayPresence, LoaderRecord)


def unique_name(configured: str | None) -> str:
    """The configured name plus host, pid and a random suffix, unique among live roles."""
    base = configured or "lisa"
    return f"{base}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def handler_name(configured: str | None) -> str:
    """The unique name of a consumer that runs handlers; see decision 33."""
    return unique_name(configured) + HANDLER_SUFFIX


def announce_consumer(
    store: Store, presence: ConsumerPresence, shard: str | None = None
) -> Flow[bool]:
    """Write or renew a consumer's record, with Redis's current time as `seen_ms`.

    `shard`: the shard that the consumer reads, if the topic is sharded. Returns True if the record
    is new.
    """
    key = store.keys.topic(shard or presence.topic).consumers
    return (yield from _announce(store, key, presence))


def leave_consumer(store: Store, topic: str, name: str) -> Flow[None]:
    """Delete a consumer's record."""
    yield from store.command("HDEL", store.keys.topic(topic).consumers, name)


def consumers(store: Store, topic: str) -> Flow[list[ConsumerPresence]]:
    """All consumer records of a topic, sorted by name, including those of gone consumers."""
    reply = yield from store.command("HGETALL", store.keys.topic(topic).consumers)
    return records_in(reply, ConsumerPresence)


def records_in(reply: Sequence[bytes] | dict[bytes, bytes], kind: type[_P]) -> list[_P]:
    """The records in an HGETALL reply, sorted by name; skips records that cannot be read."""
    found = []
    for _, record in sorted(pairs(reply).items()):
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(record, type=kind))
    return found


def alive(records: Iterable[_P], now_ms: int) -> list[_P]:
    """The records of roles that are not gone; `now_ms` is Redis's time."""
    return [record for record in records if record.seen_ms > now_ms - GONE_AFTER_MS]


def process_of(record: ConsumerPresence) -> str:
    """The process that a consumer runs in, `host:pid`; its name if the record has no pid."""
    return f"{record.host}:{record.pid}" if record.pid else record.name


def whole(parts: Sequence[ConsumerPresence]) -> ConsumerPresence:
    """Merge one consumer's records on several shards of a topic."""
    if len(parts) == 1:
        return parts[0]
    latest = max(parts, key=lambda one: one.seen_ms)
    states = [shard.state for shard in parts if shard.state != "running"]
    return msgspec.structs.replace(
        latest,
        running=sum(shard.running for shard in parts),
        held=sum(shard.held for shard in parts),
        handled=sum(shard.handled for shard in parts),
        state=states[0] if states else latest.state,
        error=next((shard.error for shard in parts if shard.error), ""),
        failing_ms=max(shard.failing_ms for shard in parts),
        busy_ms=max(shard.busy_ms for shard in parts),
    )


def announce_manager(store: Store, presence: ManagerPresence) -> Flow[bool]:
    """Write or renew a manager's record, with Redis's current time as `seen_ms`.

    Returns True if the record is new.
    """
    return (yield from _announce(store, store.keys.managers, presence))


def _announce(store: Store, key: str, presence: _P) -> Flow[bool]:
    now_ms = yield from store.server_time_ms(key)
    record = msgspec.json.encode(msgspec.structs.replace(presence, seen_ms=now_ms))
    return bool((yield from store.command("HSET", key, presence.name, record)))


def leave_manager(store: Store, name: str) -> Flow[None]:
    """Delete a manager's record."""
    yield from store.command("HDEL", store.keys.managers, name)


def managers(store: Store) -> Flow[list[ManagerPresence]]:
    """All manager records, sorted by name, including those of managers that are gone."""
    reply = yield from store.command("HGETALL", store.keys.managers)
    return records_in(reply, ManagerPresence)


def announce_relay(store: Store, presence: RelayPresence) -> Flow[bool]:
    """Write or renew a relay's record, as `announce_manager`."""
    return (yield from _announce(store, store.keys.relays, presence))


def leave_relay(store: Store, name: str) -> Flow[None]:
    """Delete a relay's record."""
    yield from store.command("HDEL", store.keys.relays, name)


def relays(store: Store) -> Flow[list[RelayPresence]]:
    """All relay records, sorted by name, including those of relays that are gone."""
    reply = yield from store.command("HGETALL", store.keys.relays)
    return records_in(reply, RelayPresence)


def loaders(store: Store) -> Flow[list[LoaderRecord]]:
    """The records of all loaders, sorted by name."""
    reply = yield from store.command("HGETALL", store.keys.loaders)
    return records_in(reply, LoaderRecord)


def write_refusals(store: Store, keys: Sequence[str]) -> Flow[list[Refusal | None]]:
    """Why the servers that hold these keys refuse writes; None where writes are accepted.

    Tries a write that changes nothing, of the kind that a full server refuses first. A user who may
    not write gets None. Raises LisaError if a server does not answer.
    """
    asked = keys if store.has_nodes else keys[:1]
    replies = yield from store.commands_once([_trial(key) for key in asked])
    found = list(map(errors.refusal_of, replies))
    return found if store.has_nodes else found * len(keys)


def _trial(key: str) -> Command:
    return ("ZADD", key, "XX", 0, "")


def write_trials(store: Store) -> list[Command]:
    """Commands that the server, or each primary of the cluster, refuses if it refuses writes."""
    shards = range(PROBED if store.has_nodes else 0)
    keys = [store.keys.topic(f"{PROBE}-{i}").waiting for i in shards]
    return [_trial(key) for key in (store.keys.managers, *keys)]


def first_refusal(replies: Sequence[object]) -> Refusal | None:
    """Why writes are refused, from the replies to `write_trials`; None if they are accepted."""
    return next(filter(None, map(errors.refusal_of, replies)), None)


def write_refusal(store: Store, key: str) -> Flow[Refusal | None]:
    """Why the server that holds a key refuses writes; None if it accepts them."""
    (found,) = yield from write_refusals(store, [key])
    return found


OVERDUE = timedelta(seconds=3)
"""A running manager promotes within milliseconds; one that starts needs a second."""

OVERDUE_AT_END = timedelta(seconds=0.5)
"""The same for the last look of a role: a short program ends before it could warn otherwise."""

WARN_EVERY_S = 60.0
LAST_LOOK_S = 0.25

log = logging.getLogger("lisa")


class ManagerWatch:
    """Looks at single topics for one role, and warns at most once per minute."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._warned = -math.inf
        self.running: set[Any] = set()
        """Threads or tasks of looks that have not ended."""

    def look(self, shards: Sequence[tuple[str, str]]) -> Flow[None]:
        """Look at topics beside the caller's flow, unless a look runs or a warning is recent.

        shards: with the group whose retries to look at as well, or "".
        """
        return self._aside(shards, OVERDUE, within_s=0.0)

    def last_look(self, shard: str, group: str = "") -> Flow[None]:
        """Look before the role ends, for a quarter of a second at most."""
        overdue = min(OVERDUE, OVERDUE_AT_END)
        return self._aside([(shard, group)], overdue, within_s=LAST_LOOK_S)

    def _aside(
        self, shards: Sequence[tuple[str, str]], overdue: timedelta, *, within_s: float
    ) -> Flow[None]:
        if not any_runs(self.running) and time.monotonic() - self._warned >= WARN_EVERY_S:
            yield Aside(self._look_at_all(shards, overdue), within_s, self.running)

    def _look_at_all(self, shards: Sequence[tuple[str, str]], overdue: timedelta) -> Flow[None]:
        for shard, group in shards:
            if time.monotonic() - self._warned >= WARN_EVERY_S:
                yield from self._look(shard, group, overdue)

    def _look(self, shard: str, group: str, overdue: timedelta) -> Flow[None]:
        try:
            late_ms = yield from overdue_without_manager(self._store, shard, group, overdue)
        except (LisaError, *errors.ClientError) as error:
            log.debug("cannot look for overdue messages of topic %s: %s", shard, error)
            return
        except Exception:  # the role may close its connection during the look
            log.debug("cannot look for overdue messages of topic %s", shard, exc_info=True)
            return
        if late_ms is not None:
            self._warned = time.monotonic()
            log.warning("topic %s: %s", shard, warning(late_ms))


def warning(late_ms: int, what: str = "messages") -> str:
    """What to tell the user about messages or schedules that are overdue by that much."""
    return (
        f"{what} are overdue by {human(late_ms)}, and no manager is running; "
        "start one: lisa-manager"
    )


def overdue_without_manager(
    store: Store, shard: str, group: str, overdue: timedelta
) -> Flow[int | None]:
    """By how many ms the first waiting message is overdue if no manager runs, else None.

    overdue: less than this does not count. One attempt; raises LisaError. A user without the rights
    to look gets None.
    """
    keys = store.keys.topic(shard)
    queues = [keys.waiting, *([keys.group(group).retry] if group else [])]
    heads = yield from store.commands_once([("ZRANGE", key, 0, 0, "WITHSCORES") for key in queues])
    dues = [float(head[1]) for head in heads if isinstance(head, list) and head]
    if not dues:
        return None
    now_ms = microseconds((yield from store.command_once("TIME"))) // 1000
    if now_ms - min(dues) < duration_ms(overdue):
        return None
    records = yield from store.command_once("HGETALL", store.keys.managers)
    if alive(records_in(records, ManagerPresence), now_ms):
        return None
    if (yield from write_refusal(store, store.keys.managers)):
        return None  # managers cannot write their heartbeats
    return int(now_ms - min(dues))
