"""A send, as middleware sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.middleware import chain
from lisa.core.redis.flow import Flow, adrive, drive
from lisa.producer.plan import Outgoing, SendOptions
from lisa.producer.report import SendOutcome


class SendCall:
    """Messages that are being sent; middleware may change them.

    topic: the topic that they are sent to.
    messages: bodies, and `Outgoing` for those with options of their own.
    options: the options for all messages, see `SendOptions`.
    """

    __slots__ = ("messages", "options", "topic")

    def __init__(self, topic: str, messages: Sequence[Any], options: SendOptions) -> None:
        self.topic = topic
        self.messages = messages
        self.options = options.copy()

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<SendCall of {len(self)} on {self.topic!r}>"

    @property
    def bodies(self) -> list[Any]:
        """The bodies, in order. To replace them, assign the same number; else InvalidMessage."""
        return [one.body if isinstance(one, Outgoing) else one for one in self.messages]

    @bodies.setter
    def bodies(self, bodies: Sequence[Any]) -> None:
        if len(bodies) != len(self):
            raise InvalidMessage(f"{len(bodies)} bodies cannot replace {len(self)}")
        self.messages = [
            msgspec.structs.replace(one, body=body) if isinstance(one, Outgoing) else body
            for one, body in zip(self.messages, bodies, strict=True)
        ]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of all messages, except those with headers of their own."""
        return self.options.get("headers") or {}

    def set_header(self, name: str, value: str, *, replace: bool = True) -> None:
        """Set a header of every message; with `replace=False`, only where it is missing."""

        def changed(headers: Mapping[str, str]) -> Mapping[str, str]:
            return headers if name in headers and not replace else {**headers, name: value}

        self.options = {**self.options, "headers": changed(self.headers)}
        self.messages = [
            msgspec.structs.replace(one, headers=changed(one.headers))
            if isinstance(one, Outgoing) and isinstance(one.headers, Mapping)
            else one
            for one in self.messages
        ]


class ThroughMiddleware(NamedTuple):
    """A step of a flow: sends a call through the methods of middleware, the first outermost."""

    methods: Sequence[Callable[..., Any]]
    call: SendCall
    send: Callable[[SendCall], Flow[Sequence[SendOutcome]]]

    def run(self, link: Any) -> Any:
        """Run the chain, blocking."""
        return chain(self.methods, lambda call: drive(self.send(call), link))(self.call)

    def arun(self, link: Any) -> Any:
        """Run the chain in the current task."""
        return chain(self.methods, lambda call: adrive(self.send(call), link))(self.call)
