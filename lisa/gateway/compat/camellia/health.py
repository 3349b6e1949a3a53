"""Whether this server is in service: how the original is taken out of a load balancer's list.

`offline` takes it out, and answers 500 until no client has come for 20 s: then it may be stopped.
All workers of one gateway see the same state, in memory that they share.
"""

from __future__ import annotations

import struct
import time
from mmap import mmap

__all__ = ["IDLE_S", "Service"]

IDLE_S = 20.0

_STATE = struct.Struct("=?7xd")
_LAST_USE = struct.Struct("=d")


class Service:
    """In service or not, and when a client last came."""

    def __init__(self, shared: mmap) -> None:
        self._shared = shared
        if not _STATE.unpack_from(shared)[1]:
            self.used()

    def used(self) -> None:
        """A client came."""
        # The monotonic clock is one for all processes of a machine.
        _LAST_USE.pack_into(self._shared, 8, time.monotonic())

    @property
    def is_online(self) -> bool:
        """Whether it is in service."""
        offline: bool = _STATE.unpack_from(self._shared)[0]
        return not offline

    def go_online(self) -> None:
        """Into service."""
        self._shared[0] = 0

    def go_offline(self) -> bool:
        """Out of service; True once no client has come for so long that it may be stopped."""
        self._shared[0] = 1
        last: float = _STATE.unpack_from(self._shared)[1]
        return time.monotonic() - last > IDLE_S
