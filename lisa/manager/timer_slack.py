"""Set the timer slack of a thread, so that the thread wakes on time."""

from __future__ import annotations

import sys
from contextlib import suppress

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1_000


def wake_on_time() -> None:
    """Reduce the timer slack of the calling thread from 50 us to 1 us. Linux only.

    By default, Linux wakes a sleeping thread up to 50 us late to batch wake-ups. That is a sixth
    of the duration of a server call.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # an optimisation only
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
