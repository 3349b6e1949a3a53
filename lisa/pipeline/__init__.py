"""Lisa on Spark: schedule, archive, report, search and restore large numbers of messages.

    from lisa.pipeline import register
    register(spark)     # enables format("lisa") for write, read, writeStream and readStream

Each job is a function of this package and a command, `lisa pipeline NAME`. The job `archive` is
`lisa.pipeline.jobs.archive.archive`, because the package `lisa.pipeline.archive` has its name.
Names are loaded on first use, because importing Spark takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires

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

_MODULES = {
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
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with requires("pipeline"):
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULE_OF.keys())
