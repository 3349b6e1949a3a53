"""new -> waiting, or straight to ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.errors import InvalidMessage, TopicFull
from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition, letters

__all__ = ["Enqueue", "Item", "OnDuplicate", "Sent"]


class OnDuplicate(StrEnum):
    """What becomes of a message whose id is live, or was settled within the retention."""

    KEEP = "keep"
    REPLACE = "replace"
    REJECT = "reject"


class Sent(StrEnum):
    """What became of one message."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REPLACED = "replaced"
    REJECTED = "rejected"


class Item(NamedTuple):
    """One message to send: `due` is '+<ms>' for a delay, else epoch ms in decimal."""

    id: str
    due: str
    envelope: bytes
    ttl_ms: int | None = None
    policy: str | None = None


_OUTCOMES = {"a": Sent.ACCEPTED, "d": Sent.DUPLICATE, "r": Sent.REPLACED, "x": Sent.REJECTED}


@dataclass(frozen=True, slots=True)
class Enqueue(Transition[list[Sent]]):
    """Send messages that share one send token. Raises TopicFull, InvalidMessage."""

    script: ClassVar[str] = "enqueue"
    topic: str
    token: str
    items: Sequence[Item]
    on_duplicate: OnDuplicate = OnDuplicate.KEEP

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        body, done = keys.body, keys.done
        return [key(item.id) for item in self.items for key in (body, done)]

    def args(self) -> Sequence[Argument]:
        items = self.items
        distinct = len({item.id for item in items}) == len(items)
        arguments: list[Argument] = [
            self.token, self.on_duplicate.value, int(distinct), len(items),
        ]  # fmt: skip
        ttls: list[Argument] = []
        policies: list[Argument] = []
        for number, (message_id, due, envelope, ttl_ms, policy) in enumerate(items, 1):
            arguments += (message_id, due, envelope)
            if ttl_ms is not None:
                ttls += (number, ttl_ms)
            if policy is not None:
                policies += (number, policy)
        return [*arguments, len(ttls) // 2, *ttls, len(policies) // 2, *policies]

    def parse(self, reply: Sequence[Any]) -> list[Sent]:
        return [_OUTCOMES[letter] for letter in letters(reply[0])]

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"FULL":
            raise TopicFull(
                f"topic {self.topic!r} holds {reply[1]} live messages and takes at most "
                f"{reply[2]} (its option capacity); nothing of this call was sent"
            )
        if reply[0] == b"LARGE":
            raise InvalidMessage(
                f"the body of message {self.items[reply[1] - 1].id!r} has {reply[2]} bytes; "
                f"topic {self.topic!r} takes at most {reply[3]} (its option max_body_bytes)"
            )
        Transition.refuse(self, reply)
