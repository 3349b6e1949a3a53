"""Lisa on Spark: schedule, archive, report, search and restore more than one machine's worth.

    from lisa.pipeline import register
    register(spark)     # then format("lisa") is known: write, read, writeStream, readStream

Each job is a function here and a command, `lisa pipeline NAME`; `archive` shares its name with the
package of the tables and so stands in `lisa.pipeline.jobs.archive`. Names are loaded when they are
first used: Spark takes a second to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.pipeline.archive import Archive, open_archive
    from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
    from lisa.pipeline.jobs.audit import audit
    from lisa.pipeline.jobs.report import report
    from lisa.pipeline.jobs.restore import restore
    from lisa.pipeline.jobs.schedule import Scheduled, schedule
    from lisa.pipeline.jobs.search import search
    from lisa.pipeline.session import spark_session
    from lisa.pipeline.source import register
    from lisa.pipeline.source.read_columns import LIVE_SCHEMA

__all__ = [
    "EVENT_SCHEMA",
    "LIVE_SCHEMA",
    "LOG_SCHEMA",
    "MESSAGES_SCHEMA",
    "Archive",
    "Scheduled",
    "audit",
    "open_archive",
    "register",
    "report",
    "restore",
    "schedule",
    "search",
    "spark_session",
]

_HOMES = {
    "archive": ("Archive", "open_archive"),
    "archive.schemas": ("EVENT_SCHEMA", "LOG_SCHEMA", "MESSAGES_SCHEMA"),
    "jobs.audit": ("audit",),
    "jobs.report": ("report",),
    "jobs.restore": ("restore",),
    "jobs.schedule": ("Scheduled", "schedule"),
    "jobs.search": ("search",),
    "session": ("spark_session",),
    "source": ("register",),
    "source.read_columns": ("LIVE_SCHEMA",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name at its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
