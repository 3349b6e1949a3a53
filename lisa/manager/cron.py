"""The thin side towards APScheduler: a schedule becomes a trigger."""

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from lisa.core.cron import read_schedule
from lisa.core.errors import ConfigError


def parse_trigger(text: str | timedelta, *, zone: tzinfo | None = None) -> Any:
    """The APScheduler trigger of a cron expression or an interval (see `lisa.core.cron`).

    `zone` is the zone of the fields, by default the machine's. Raises `ConfigError` that names
    field, value and cure, also for an expression whose years have all passed.
    """
    schedule = read_schedule(text)
    if isinstance(schedule, timedelta):
        return IntervalTrigger(seconds=schedule.total_seconds(), timezone=zone)
    trigger = CronTrigger(
        year=schedule.year,
        month=schedule.month,
        day=schedule.day,
        day_of_week=schedule.day_of_week,
        hour=schedule.hour,
        minute=schedule.minute,
        second=schedule.second,
        timezone=zone,
    )
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise ConfigError(f"cron {text!r} never fires again; name a later year")
    return trigger
