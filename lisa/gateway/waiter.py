"""A waiting pull, and the deliveries that it gets."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from lisa.core.model.message import Message
from lisa.core.store.runner import caller
from lisa.gateway.receipts import Receipt, encode_receipt


class HandedOut(NamedTuple):
    """One message for a client, which settles it by its receipt."""

    message: Message
    receipt: Receipt
    size: int

    @property
    def receipt_text(self) -> str:
        """The receipt in the form that clients get."""
        return encode_receipt(self.receipt)


class Waiter:
    """One waiting pull.

    most: the most deliveries to return.
    ends: when to stop waiting, in `time.monotonic` seconds.
    found: the deliveries so far, while further ones are taken.
    caller: on whose behalf the deliveries are opened, for the journal.
    """

    __slots__ = ("caller", "ends", "found", "future", "most", "timeout_ms")

    def __init__(self, most: int, timeout_ms: int | None, ends: float) -> None:
        self.most = most
        self.timeout_ms = timeout_ms
        self.ends = ends
        self.found: list[HandedOut] = []
        self.caller = caller.get()
        self.future: asyncio.Future[list[HandedOut]] = asyncio.get_running_loop().create_future()

    def is_open(self) -> bool:
        """Whether the pull still waits."""
        return not self.future.done()

    @property
    def missing(self) -> int:
        """How many more deliveries the pull accepts; 0 if it has ended."""
        return self.most - len(self.found) if self.is_open() else 0

    def answer(self) -> None:
        """End the pull with what it has found; does nothing if the pull has ended."""
        if self.is_open():
            self.future.set_result(self.found)

    def fail(self, error: Exception) -> None:
        """End the pull with an error; does nothing if the pull has ended."""
        if self.is_open():
            self.future.set_exception(error)
