"""Confirms that enough replicas have a write before it counts as done.

WAIT counts the replicas that have everything written *on its connection*. A call that is repeated
after a lost reply writes nothing on its new connection, so a bare WAIT could confirm a write that
no replica has (as Redis 7.2 and Valkey do; earlier servers count all writes). Therefore a dummy
write, a key that expires immediately, is sent between the script and WAIT: a replica that has it
has everything before it. All three are sent together on one connection.
"""

from __future__ import annotations

from typing import Any

from lisa.core.model.durability import Replicas
from lisa.core.redis.flow import Chain, Command, Flow


class TooFewReplicas(Exception):
    """Only `count` replicas had the write at the deadline."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def _wait(wanted: Replicas, within_ms: int) -> Command:
    """The command that waits for replicas; a time limit of 0 would block forever."""
    within_ms = max(1, within_ms)
    if wanted.fsync:
        return ("WAITAOF", 0, wanted.count, within_ms)
    return ("WAIT", wanted.count, within_ms)


def confirmed(call: Command, mark: str, wanted: Replicas, within_s: float) -> Flow[Any]:
    """The reply to a script call, once `wanted.count` replicas have its writes.

    `mark` is a key on the same node, for the dummy write. Raises `TooFewReplicas` and errors of
    the client.
    """
    wait = _wait(wanted, int(within_s * 1000))
    reply, *rest = yield Chain(mark, (call, ("SET", mark, "", "PX", 1), wait))
    if isinstance(reply, Exception):
        raise reply
    if reply[0] != b"OK":
        return reply  # refused or out of date: nothing was written
    marked, waited = rest
    for one in (marked, waited):
        if isinstance(one, Exception):
            raise one
    count = waited[1] if wanted.fsync else waited
    if count < wanted.count:
        raise TooFewReplicas(count)
    return reply


def lacks_command(error: BaseException) -> bool:
    """Whether the server is too old for WAITAOF."""
    text = str(error).lower()
    return "unknown command" in text and "waitaof" in text
