"""A queue that hands items from some threads to others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadQueue(Generic[T]):
    """A queue into which any thread may put items, and from which any thread may take them.

    No call blocks. Unlike `queue.SimpleQueue`, it hands out many items at a time, and takes items
    back.
    """

    __slots__ = ("_items", "put")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.put = self._items.append
        """Add one item. Not a method, because that would take twice as long."""

    def __len__(self) -> int:
        return len(self._items)

    def put_all(self, items: Iterable[T]) -> None:
        """Add items at the end."""
        self._items.extend(items)

    def put_back(self, items: Sequence[T]) -> None:
        """Return the items of `take_many` to the front, in order."""
        self._items.extendleft(reversed(items))

    def first(self) -> T | None:
        """The next item, which stays in the queue; None if the queue is empty."""
        with suppress(IndexError):
            return self._items[0]
        return None

    def take(self) -> T | None:
        """Remove and return the next item; None if the queue is empty."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def take_many(self, size: int) -> list[T]:
        """Remove and return up to `size` items; fewer if another thread takes items too."""
        some: list[T] = []
        with suppress(IndexError):
            while len(some) < size:
                some.append(self._items.popleft())
        return some

    def take_all(self) -> list[T]:
        """Remove and return the items that are in the queue now, not those added meanwhile."""
        return self.take_many(len(self._items))
