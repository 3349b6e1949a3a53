"""What middleware sees of a send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.middleware import chain
from lisa.core.redis.flow import Flow, adrive, drive
from lisa.producer.plan import Outgoing, SendOptions
from lisa.producer.report import SendOutcome


class SendCall:
    """The messages of one call of middleware, which may change them.

    topic: where they are sent.
    messages: bodies, and `Outgoing` for those with options of their own.
    options: the options for all messages, see `SendOptions`.
    """

    __slots__ = ("messages", "options", "topic")

    def __init__(self, topic: str, messages: Sequence[Any], options: SendOptions) -> None:
        self.topic = topic
        self.messages = messages
        self.options = options

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"<SendCall of {len(self)} on {self.topic!r}>"

    @property
    def bodies(self) -> list[Any]:
        """The bodies, in order. Assign as many others to replace them."""
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
        """Set a header of every message; without `replace`, only where it is missing."""

        def changed(headers: Mapping[str, str]) -> Mapping[str, str]:
            return headers if name in headers and not replace else {**headers, name: value}

        self.options = {**self.options, "headers": changed(self.headers)}
        self.messages = [
            msgspec.structs.replace(one, headers=changed(one.headers))
            if isinstance(one, Outgoing) and one.headers is not None
            else one
            for one in self.messages
        ]


class ThroughMiddleware(NamedTuple):
    """A step of a flow: sends a call through the methods of middleware, the first outermost."""

    methods: Sequence[Callable[..., Any]]
    call: SendCall
    send: Callable[[SendCall], Flow[Sequence[SendOutcome]]]

    def run(self, link: Any) -> Sequence[SendOutcome]:
        """Run the chain, blocking."""
        outcomes = chain(self.methods, lambda call: drive(self.send(call), link))(self.call)
        return self._checked(outcomes)

    async def arun(self, link: Any) -> Sequence[SendOutcome]:
        """Run the chain in the current task."""

        def send(call: SendCall) -> Awaitable[Sequence[SendOutcome]]:
            return adrive(self.send(call), link)

        return self._checked(await chain(self.methods, send)(self.call))

    def _checked(self, outcomes: Any) -> Sequence[SendOutcome]:
        if not isinstance(outcomes, Sequence) or len(outcomes) != len(self.call):
            raise TypeError(
                f"middleware must return the {len(self.call)} outcomes that call_next returned, "
                f"not {outcomes!r}"
            )
        return outcomes
