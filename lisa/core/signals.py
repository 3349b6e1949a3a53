"""The blinker signals that consumers and managers fire, module-wide.

The sender is the topic, a string, which matches by value; receivers are called
`f(topic, *, message)`. Each consumer has five of its own beside these.
"""

from __future__ import annotations

from blinker import Signal

__all__ = [
    "Signals",
    "everywhere",
    "message_acked",
    "message_dead",
    "message_expired",
    "message_received",
    "message_retrying",
]


class Signals:
    """One set of the five signals."""

    __slots__ = ("acked", "dead", "expired", "received", "retrying")

    def __init__(self) -> None:
        self.received = Signal("A message is in flight: handle it.")
        self.acked = Signal("Redis confirmed that a message is settled.")
        self.retrying = Signal("A message failed and will be tried again.")
        self.dead = Signal("A message went to garbage.")
        self.expired = Signal("A message was past its ttl and will not be handled.")


everywhere = Signals()
message_received = everywhere.received
message_acked = everywhere.acked
message_retrying = everywhere.retrying
message_dead = everywhere.dead
message_expired = everywhere.expired
