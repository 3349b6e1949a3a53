"""A test kit for applications that use Lisa: a real server whose clock the test controls.

`pip install 'lisa-delay-queue[test]'` makes its fixtures available in pytest:

    def test_unpaid_order_is_cancelled(lisa):
        lisa.producer.send("orders", {"order": 42}, delay=timedelta(days=30))
        lisa.advance(days=30)
        assert [m.body for m in lisa.handled("orders")] == [{"order": 42}]

`RecordingProducer` needs no server. Every name is loaded at first use: pytest imports this package
in every run, also in runs that do not use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires

if TYPE_CHECKING:
    from lisa.testing.clocked_server import ClockedServer
    from lisa.testing.kit import AsyncLisaTestKit, LisaTestKit
    from lisa.testing.recording import AsyncRecordingProducer, RecordingProducer
    from lisa.testing.records import Attempt, SentMessage

__all__ = [
    "AsyncLisaTestKit",
    "AsyncRecordingProducer",
    "Attempt",
    "ClockedServer",
    "LisaTestKit",
    "RecordingProducer",
    "SentMessage",
]

_HOMES = {
    "clocked_server": ("ClockedServer",),
    "kit": ("AsyncLisaTestKit", "LisaTestKit"),
    "records": ("Attempt", "SentMessage"),
    "recording": ("AsyncRecordingProducer", "RecordingProducer"),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name at its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with requires("test"):
        value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
