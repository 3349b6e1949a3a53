"""The blinker signals that consumers and managers fire.

The sender is the topic, a string, which matches by value. Receivers are called as
`f(topic, *, message)`. Each consumer also has its own set of the five signals.
"""

from __future__ import annotations

from blinker import Signal


class Signals:
    """A set of the five signals."""

    __slots__ = ("acked", "dead", "expired", "received", "retrying")

    def __init__(self) -> None:
        self.received = Signal("A message was delivered to a handler.")
        self.acked = Signal("Redis confirmed that a message is settled.")
        self.retrying = Signal("A message failed and will be tried again.")
        self.dead = Signal("A message moved to garbage.")
        self.expired = Signal("A message exceeded its ttl and will not be handled.")


everywhere = Signals()
message_received = everywhere.received
message_acked = everywhere.acked
message_retrying = everywhere.retrying
message_dead = everywhere.dead
message_expired = everywhere.expired
