"""`lisa.send` and the other module-level functions, which share one producer per process.

The first call creates the producer as `Producer.from_config()` does: from `LISA_REDIS_URL` and the
other `LISA_*` variables, the YAML file named by `LISA_CONFIG`, or else redis://localhost:6379/0.
Threads share the producer. It is closed at interpreter exit.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import re
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from lisa.core.model.addresses import KUBERNETES_VARIABLE
from lisa.producer.producer import Producer

P = ParamSpec("P")
T = TypeVar("T")


_READ_WITHOUT_SETTINGS = ("LISA_REDIS_URL", "LISA_PREFIX")


def _configured() -> Producer:
    """A producer; loads the settings, and with them pydantic, only if a variable needs it."""
    for name, value in os.environ.items():
        is_known = name in _READ_WITHOUT_SETTINGS or re.fullmatch(KUBERNETES_VARIABLE, name)
        if name.startswith("LISA_") and value.strip() and not is_known:
            return Producer.from_config()
    return Producer()


class _Shared:
    """Creates the producer once, in the first thread that needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = _configured()
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
    shown = list(signature.parameters.values())[1:]  # without self
    call.__dict__["__signature__"] = signature.replace(parameters=shown)
    return call


send = _on_shared(Producer.send)
send_one = _on_shared(Producer.send_one)
send_many = _on_shared(Producer.send_many)
send_stream = _on_shared(Producer.send_stream)
cancel = _on_shared(Producer.cancel)
cancel_many = _on_shared(Producer.cancel_many)
reschedule = _on_shared(Producer.reschedule)
fire_now = _on_shared(Producer.fire_now)
get = _on_shared(Producer.get)
schedule = _on_shared(Producer.schedule)
schedules = _on_shared(Producer.schedules)
get_schedule = _on_shared(Producer.get_schedule)
pause_schedule = _on_shared(Producer.pause_schedule)
resume_schedule = _on_shared(Producer.resume_schedule)
remove_schedule = _on_shared(Producer.remove_schedule)
run_schedule = _on_shared(Producer.run_schedule)
next_ticks = _on_shared(Producer.next_ticks)
backfill_schedule = _on_shared(Producer.backfill_schedule)


def close() -> None:
    """Close the shared producer; the next call creates a new one and reads the settings again."""
    _shared.close()
