"""Convert a schedule to an APScheduler trigger."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from lisa.core.model.cron import read_schedule
from lisa.core.model.errors import ConfigError


def parse_trigger(text: str | timedelta, *, zone: tzinfo | None = None) -> Any:
    """The APScheduler trigger of a cron expression or an interval (see `lisa.core.model.cron`).

    `zone` is the time zone of the fields; the default is the machine's. Raises `ConfigError` if the
    text is invalid or all its years have passed; the message names the field and the value.
    """
    schedule = read_schedule(text)
    if isinstance(schedule, timedelta):
        return IntervalTrigger(seconds=schedule.total_seconds(), timezone=zone)
    trigger = CronTrigger(**asdict(schedule), timezone=zone)
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise ConfigError(f"cron {text!r} never fires again; use a later year")
    return trigger
