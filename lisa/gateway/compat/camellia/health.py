"""The in-service flag, with which the original is taken out of a load balancer.

`offline` clears the flag and answers 500 until there was no client request for 20 s; the server can
then be stopped. All workers of one gateway share the state through shared memory.
"""

from __future__ import annotations

import struct
import time
from mmap import mmap

IDLE_S = 20.0

_STATE = struct.Struct("=?7xd")
_LAST_USE = struct.Struct("=d")


class ServiceState:
    """The in-service flag and the time of the last client request."""

    def __init__(self, shared: mmap) -> None:
        self._shared = shared
        if not _STATE.unpack_from(shared)[1]:
            self.used()

    def used(self) -> None:
        """Record a client request."""
        # All processes of a machine share the monotonic clock.
        _LAST_USE.pack_into(self._shared, 8, time.monotonic())

    @property
    def is_online(self) -> bool:
        """Whether the server is in service."""
        offline: bool = _STATE.unpack_from(self._shared)[0]
        return not offline

    def go_online(self) -> None:
        """Put the server in service."""
        self._shared[0] = 0

    def go_offline(self) -> bool:
        """Take the server out of service; True once idle for `IDLE_S`, when it may be stopped."""
        self._shared[0] = 1
        last: float = _STATE.unpack_from(self._shared)[1]
        return time.monotonic() - last > IDLE_S
