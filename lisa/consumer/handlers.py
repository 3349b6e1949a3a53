"""The handlers of a topic: receivers of `message_received`, and batch handlers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from blinker import Signal

from lisa.consumer.handler_checks import (
    check_signature,
    checked_batch,
    checked_concurrency,
    checked_retry,
    checked_seconds,
)
from lisa.consumer.models import reader_for
from lisa.consumer.receivers import Handler, HandlerPlan, Listener, Receiver
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_group, check_topic
from lisa.core.model.middleware import BaseMiddleware
from lisa.core.model.signals import Signals, everywhere

SHARED_OPTIONS = ("retry", "concurrency")
"""Options that apply to the messages of a topic, so its handlers cannot give different values."""


class Handlers:
    """A consumer's own signals and handlers; the module-wide signals are used in addition."""

    def __init__(self) -> None:
        self.signals = Signals()
        self._own: dict[str, list[Receiver]] = {}
        self._batches: dict[tuple[str, str], Receiver] = {}
        self._named: set[tuple[str, str]] = set()
        """Topics with the groups that a handler names."""
        self.middleware: Sequence[BaseMiddleware] = ()

    def use(self, middleware: Sequence[BaseMiddleware]) -> None:
        """Call all handlers through middleware. Raises ConfigError if a method is missing."""
        self.middleware = middleware
        for receiver in itertools.chain(*self._own.values(), self._batches.values()):
            receiver.use(middleware)

    def add(
        self,
        topic: str,
        handler: Handler,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
        retry: object = None,
        concurrency: int | None = None,
        group: str | None = None,
    ) -> None:
        """Register a handler of a topic.

        Raises ConfigError if an option or the handler's signature is invalid, and InvalidMessage if
        the topic name is.
        """
        topic = check_topic(topic)
        check_signature(topic, handler, "message" if batch is None else "batch")
        receiver = Receiver(
            handler,
            read=None if model is None else reader_for(model),
            batch=checked_batch(topic, batch, within),
            within_s=checked_seconds(topic, "within", within) or 0.0,
            timeout_s=checked_seconds(topic, "timeout", timeout),
            retry=None if retry is None else checked_retry(topic, retry),
            concurrency=checked_concurrency(topic, concurrency),
            group="" if group is None else check_group(group),
        )
        receiver.use(self.middleware)
        for name in SHARED_OPTIONS:
            self._check_shared(topic, receiver.group, name, getattr(receiver, name))
        where = topic, receiver.group
        if receiver.batch is None:
            self._own.setdefault(topic, []).append(receiver)
            self.signals.received.connect(receiver, sender=topic, weak=False)
        elif where in self._batches:
            raise ConfigError(f"topic {topic!r} already has a batch handler; only one is allowed")
        else:
            self._batches[where] = receiver
        if receiver.group:
            self._named.add(where)

    def remove(self, topic: str) -> None:
        """Remove the handlers of a topic that `add` registered."""
        self._batches = {where: one for where, one in self._batches.items() if where[0] != topic}
        self._named = {where for where in self._named if where[0] != topic}
        for receiver in self._own.pop(topic, []):
            self.signals.received.disconnect(receiver, sender=topic)

    def topics(self) -> list[str]:
        """The topics of this consumer's own handlers, sorted by name."""
        batches = {topic for topic, _ in self._batches}
        return sorted(batches.union(_senders(self.signals.received)))

    def groups(self, topic: str) -> list[str]:
        """The groups that handlers of a topic name, sorted."""
        return sorted(group for named, group in self._named if named == topic)

    def has_without_group(self, topic: str) -> bool:
        """Whether a handler of the topic names no group."""
        own = self._own.get(topic, ())
        return (topic, "") in self._batches or any(not one.group for one in own)

    def module_topics(self) -> list[str]:
        """The topics of module-wide receivers, sorted by name."""
        return sorted(_senders(everywhere.received))

    def _scope(self, topic: str, wanted: str) -> str:
        """The group that its handlers name, or "" for that of handlers that name none."""
        return wanted if (topic, wanted) in self._named else ""

    def batch(self, topic: str, wanted: str = "") -> Receiver | None:
        """The batch handler of a topic for a requested group, or None."""
        return self._batches.get((topic, self._scope(topic, wanted)))

    def option(self, topic: str, wanted: str, name: str) -> Any:
        """The value of one of `SHARED_OPTIONS` that a handler gives, or None."""
        scope = self._scope(topic, wanted)
        own = [one for one in self._own.get(topic, ()) if one.group == scope]
        every = [*own, *filter(None, [self._batches.get((topic, scope))])]
        return next((value for one in every if (value := getattr(one, name)) is not None), None)

    def _check_shared(self, topic: str, group: str, name: str, value: object) -> None:
        known = self.option(topic, group, name)
        if None not in (known, value) and known != value:
            raise ConfigError(
                f"topic {topic!r}: another handler has a different {name}=; one value applies to "
                "all handlers of a topic"
            )

    def plan(self, topic: str, wanted: str = "") -> HandlerPlan:
        """The current handlers of a topic for a requested group, or "".

        Weakly connected receivers may have disappeared.
        """
        heard: Iterable[Any] = (
            *self.signals.received.receivers_for(topic),
            *everywhere.received.receivers_for(topic),
        )
        if self._named:
            scope = self._scope(topic, wanted)
            heard = [one for one in heard if not isinstance(one, Receiver) or one.group == scope]
        return HandlerPlan(
            tuple(
                one if isinstance(one, Receiver) else Listener.of(one, self.middleware)
                for one in heard
            ),
            self.batch(topic, wanted),
        )


def _senders(signal: Signal) -> Iterator[str]:
    # blinker has no public list of senders; it uses a string sender as its own key.
    for sender, receivers in list(signal._by_sender.items()):  # noqa: SLF001
        if isinstance(sender, str) and receivers:
            yield sender
