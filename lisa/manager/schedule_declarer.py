"""Declares the schedules of the configuration.

A declaration changes only schedules that a declaration wrote last, so an operator's changes stay.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.recurring.definition import ScheduleDefinition
from lisa.core.store import schedules
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import text
from lisa.manager.bulk_reads import ask_all
from lisa.manager.topic_log import TopicLog

FIELD = "schedules"
"""The field of a topic's options hash with the names of declared schedules, a JSON list."""

MOST_REPORTED = 1000
"""Topics in which a starting manager looks for schedules of other files."""

log = logging.getLogger(__name__)


def declare(store: SyncStore, topic: str, wanted: Mapping[str, ScheduleDefinition]) -> None:
    """Declare a topic's schedules, and remove those that are no longer declared.

    Raises LisaError. If only some schedules fail, it names them, after all others were declared.
    """
    key = store.keys.topic(topic).options
    stored = store.ask("HGET", key, FIELD)
    try:
        earlier: list[str] = msgspec.json.decode(stored, type=list[str]) if stored else []
    except msgspec.DecodeError as error:
        raise LisaError(f"field {FIELD} of {key}: {error}; delete the field") from error
    if not wanted and not earlier:
        return
    names = sorted({*earlier, *wanted})
    if names != earlier:  # before they exist: an interrupted declaration can be taken back
        store.ask("HSET", key, FIELD, msgspec.json.encode(names))
    failures = []
    for name in names:
        try:
            _declare(store, topic, name, wanted.get(name))
        except ServerUnavailable:
            raise
        except LisaError as error:
            failures.append(f"schedule {name}: {error}")
    if failures:
        raise LisaError("; ".join(failures))
    if not wanted:
        store.ask("HDEL", key, FIELD)
    elif names != sorted(wanted):
        store.ask("HSET", key, FIELD, msgspec.json.encode(sorted(wanted)))


def report_others(store: SyncStore, named: Collection[str]) -> None:
    """Log the declared schedules of topics that this configuration does not name; they stay.

    Another manager's file may declare them, or an earlier version of this one. Raises LisaError.
    """
    listed = store.ask("ZRANGE", store.keys.scheduled, 0, MOST_REPORTED - 1)
    topics = [topic for topic in map(text, listed) if topic not in named]
    keys = [store.keys.topic(topic).options for topic in topics]
    found = []
    for topic, reply in zip(
        topics, ask_all(store, [("HGET", key, FIELD) for key in keys]), strict=True
    ):
        if isinstance(reply, bytes):
            found += [f"{topic}/{name}" for name in msgspec.json.decode(reply, type=list[str])]
    if found:
        log.info(
            "declared by a manager's file, but not by this one: the schedules %s; "
            "`lisa schedules remove TOPIC NAME` removes one",
            ", ".join(found),
        )


def _declare(
    store: SyncStore, topic: str, name: str, definition: ScheduleDefinition | None
) -> None:
    """Declare one schedule; None removes it."""
    if definition is None:
        if store.drive(schedules.remove(store, topic, name, only_declared=True)):
            TopicLog(log, topic).info("schedule %s removed", name)
    elif store.drive(schedules.put(store, topic, name, definition, declared=True)):
        TopicLog(log, topic).info("schedule %s declared", name)
