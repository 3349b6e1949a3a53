"""`lisa.send` and its kin: one producer for the whole program, configured from its surroundings.

It is made at the first call, as `Producer.from_config()` does: from `LISA_REDIS_URL` and the other
`LISA_*` names, the YAML that `LISA_CONFIG` names, else for redis://localhost:6379/0. Threads share
it; it is closed when the program ends.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from lisa.producer.producer import Producer

__all__ = [
    "cancel",
    "cancel_many",
    "close",
    "fire_now",
    "get",
    "reschedule",
    "send",
    "send_many",
    "send_stream",
]

P = ParamSpec("P")
T = TypeVar("T")


class _Shared:
    """Makes the producer once, whichever thread comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = Producer.from_config()
                atexit.register(self.close)
            return self._producer

    def close(self) -> None:
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            atexit.unregister(self.close)
            producer.close()


_shared = _Shared()


def _on_shared(method: Callable[Concatenate[Producer, P], T]) -> Callable[P, T]:
    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(_shared.producer(), *args, **kwargs)

    signature = inspect.signature(method)
    shown = list(signature.parameters.values())[1:]  # whose producer it is goes without saying
    call.__dict__["__signature__"] = signature.replace(parameters=shown)
    return call


send = _on_shared(Producer.send)
send_many = _on_shared(Producer.send_many)
send_stream = _on_shared(Producer.send_stream)
cancel = _on_shared(Producer.cancel)
cancel_many = _on_shared(Producer.cancel_many)
reschedule = _on_shared(Producer.reschedule)
fire_now = _on_shared(Producer.fire_now)
get = _on_shared(Producer.get)


def close() -> None:
    """Close the shared producer; the next call makes one anew, and reads its surroundings again."""
    _shared.close()
