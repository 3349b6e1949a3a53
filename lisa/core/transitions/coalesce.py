"""Sends that one message stands for: new -> waiting, or a new body for an unstarted message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lisa.core.model.keys import COALESCED_IDS, TopicKeys, keyed_id
from lisa.core.transitions.base import LANES, Argument, ById, Elsewhere, Recorded, text
from lisa.core.transitions.enqueue import SendOutcome, Sent, numbered, refuse_send
from lisa.core.transitions.loader import Features


def is_rule(due: str) -> bool:
    """Whether a due time is a rule of a coalescing send."""
    return due[0] in "dtl"


@dataclass(frozen=True, eq=False, repr=False)
class Coalesce(Recorded, ById[SendOutcome]):
    """Send messages of keys, given in columns, with one send token.

    Of the messages of a key at most one is unstarted: later sends replace its body. Raises
    TopicFull, KeyFull, InvalidMessage.

    rules: see the header of `lua/coalesce.lua`.
    ttls_ms, policies: None for a message without its own value; empty if no message has one.
    has_local: whether an envelope may have the header of a wall time, which managers follow.
    if_known: for a shard that was closed: leave keys alone that have no live message there. A key
        moves to its new shard once its messages of these sends have ended.
    """

    script: ClassVar[str] = "coalesce"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 1.0
    checks_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("keys", "rules", "envelopes", "ttls_ms", "policies")
    outcomes: ClassVar[Mapping[str, Any]] = {
        "a": Sent.ACCEPTED,
        "r": Sent.REPLACED,
        "f": Sent.REPLACED_IN_FLIGHT,
        "b": Sent.UPDATED,
    }
    token: str
    keys: Sequence[str]
    rules: Sequence[str]
    envelopes: Sequence[bytes]
    ttls_ms: Sequence[int | None] = ()
    policies: Sequence[str | None] = ()
    has_local: bool = False
    if_known: bool = False

    @property
    def features(self) -> Features:
        return frozenset({LANES})

    @property
    def message_ids(self) -> Sequence[str]:
        return [keyed_id(key, COALESCED_IDS[0]) for key in self.keys]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        ids = [keyed_id(key, own_id) for key in self.keys for own_id in COALESCED_IDS]
        return [keys.throttled, *keys.bodies_and_tombstones(ids)]

    def args(self) -> Sequence[Argument]:
        return [
            self.token,
            int(self.if_known),
            len(self.keys),
            *self.rules,
            *self.envelopes,
            *numbered(self.ttls_ms),
            *numbered(self.policies),
        ]

    def parse(self, reply: Sequence[Any]) -> list[Any]:
        letters, numbers = map(text, reply)
        return [
            Elsewhere.UNKNOWN
            if letter == "u"
            else SendOutcome(keyed_id(key, COALESCED_IDS[int(number) - 1]), self.outcomes[letter])
            for key, letter, number in zip(self.keys, letters, numbers, strict=True)
        ]

    @property
    def asks_older(self) -> Literal["first"]:
        return "first"

    def first_of(self, shard: str, picks: Sequence[int]) -> Coalesce:
        return replace(self.part(shard, picks), if_known=True)

    def refuse(self, reply: Sequence[Any]) -> None:
        refuse_send(self, reply)
