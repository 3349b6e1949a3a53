"""Schedules in a torture run: defined before the faults, counted tick by tick after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lisa.admin.fsck import check
from lisa.core.model.recurring.define import define
from lisa.core.model.recurring.ticks import next_tick
from lisa.core.store import schedule_reads, schedules
from lisa.core.transitions.declare import Declare
from tests.torture.world import SCHEDULES, TICKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lisa.core.store.store import SyncStore


def begin(store: SyncStore) -> dict[str, int]:
    """Define the schedules; returns the first tick of each."""
    store.call(Declare(TICKS, "lisa"))
    first = {}
    for name, options in SCHEDULES.items():
        store.drive(schedules.put(store, TICKS, name, define(name, dict(options))))  # type: ignore[arg-type]
        record = store.drive(schedule_reads.get_record(store, TICKS, name))
        assert record is not None
        assert record.tick is not None
        first[name] = record.tick
    return first


def found(store: SyncStore, first: Mapping[str, int]) -> dict[str, Any]:
    """The ticks of each schedule that there should be, and those that there are."""
    keys = store.keys.topic(TICKS)
    bodies = store.connection.execute(("KEYS", keys.body("*")))
    ids = [one.decode().removeprefix(keys.body("")) for one in bodies]
    now_ms = store.drive(store.server_time_ms())
    named: dict[str, Any] = {}
    for name, tick in first.items():
        record = store.drive(schedule_reads.get_record(store, TICKS, name))
        own = [int(one.partition("@")[2]) for one in ids if one.startswith(f"{name}@")]
        ends = record.tick if record else None
        named[name] = {
            "version": record.version if record else 0,
            "behind_ms": now_ms - ends if ends is not None else None,
            "expected": _ticks(name, tick, ends, is_made=bool(record and record.is_made)),
            "found": sorted(own),
        }
    report = store.drive(check(store, [TICKS]))
    sent = int(store.ask("HGET", keys.stats, "sent") or 0)
    return {"schedules": named, "sent": sent, "findings": [str(one) for one in report.findings]}


def _ticks(name: str, first: int, ends: int | None, *, is_made: bool) -> list[int]:
    """All ticks from the first to the next one, which counts if its message exists."""
    definition, ticks = define(name, dict(SCHEDULES[name])), [first]  # type: ignore[arg-type]
    while ends is not None and ticks[-1] < ends:
        ticks.append(next_tick(definition, 0, ticks[-1]) or ends)
    return ticks if is_made else ticks[:-1]
