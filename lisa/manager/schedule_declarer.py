"""Declares the schedules of the configuration.

A declaration changes only schedules that a declaration wrote last, so an operator's changes stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.recurring.definition import ScheduleDefinition
from lisa.core.store import schedules
from lisa.core.store.store import SyncStore
from lisa.manager.topic_log import TopicLog

FIELD = "schedules"
"""The field of a topic's options hash with the names of declared schedules, a JSON list."""

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


def _declare(
    store: SyncStore, topic: str, name: str, definition: ScheduleDefinition | None
) -> None:
    """Declare one schedule; None removes it."""
    if definition is None:
        if store.drive(schedules.remove(store, topic, name, only_declared=True)):
            TopicLog(log, topic).info("schedule %s removed", name)
    elif store.drive(schedules.put(store, topic, name, definition, declared=True)):
        TopicLog(log, topic).info("schedule %s declared", name)
