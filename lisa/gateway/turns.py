"""Lets other requests have their turn during a long calculation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

TURN_S = 0.001
"""How long a calculation keeps the event loop; another request needs several turns."""


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a pause for other tasks once their calculation and use have taken a turn."""
    began = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - began >= TURN_S:
            await asyncio.sleep(0)
            began = time.monotonic()
