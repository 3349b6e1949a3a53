"""Transactions: messages that exist exactly if a transaction of the application commits.

    from lisa.outbox import Outbox

    outbox = Outbox()
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, "orders", {"order": 42}, delay="30m")

An `Outbox` writes operations into a table of the application's database, and a `Relay` does them
after the commit. An `Inbox` records deliveries, so that effects in the database happen once. Names
are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires

if TYPE_CHECKING:
    from lisa.outbox.inbox import Inbox
    from lisa.outbox.outbox import AsyncOutbox, Outbox
    from lisa.outbox.relay import Relay
    from lisa.outbox.tables import Tables

__all__ = ["AsyncOutbox", "Inbox", "Outbox", "Relay", "Tables"]

_MODULES = {
    "AsyncOutbox": "outbox",
    "Inbox": "inbox",
    "Outbox": "outbox",
    "Relay": "relay",
    "Tables": "tables",
}


def __getattr__(name: str) -> object:
    """Load a name from its module; raises MissingExtra if SQLAlchemy is not installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with requires("sql"):
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES.keys())
