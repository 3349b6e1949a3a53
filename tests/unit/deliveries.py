"""Shared by the consumer's tests without a server."""

from __future__ import annotations

from lisa.consumer.inflight import Held
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.message import Message


def held(name: str = "a", body: object = None) -> Held:
    """A delivery of a message to the group `lisa` of the topic `orders`."""
    message = Message(id=name, topic="orders", group="lisa", body=body, due_ms=0)
    return Held(f"{name}-1", message, encode_envelope("tokentok", body), 0, 0.0, 9e9)


def no_wait(_awaitable: object) -> object:
    """For flows that must not wait."""
    raise AssertionError("nothing here is to be awaited")
