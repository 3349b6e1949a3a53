"""new -> waiting, or straight to ready."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

from lisa.core.model.errors import InvalidMessage, KeyFull, TopicFull
from lisa.core.model.keys import TopicKeys, shown_id
from lisa.core.model.sharding import KEY_END
from lisa.core.transitions.base import KEYED, Argument, ById, Elsewhere, Transition, text
from lisa.core.transitions.loader import Features


class OnDuplicate(StrEnum):
    """What to do with a message whose id is live, or was settled within the retention.

    KEEP_LIVE keeps a live message, and replaces one that was settled, cancelled or is in garbage.
    UPDATE replaces all but the due time of a message that waits to be handed out, and otherwise
    replaces it.
    """

    KEEP = "keep"
    KEEP_LIVE = "keep_live"
    REPLACE = "replace"
    UPDATE = "update"
    REJECT = "reject"


class Sent(StrEnum):
    """Outcome of sending one message.

    REPLACED_IN_FLIGHT: a consumer holds the earlier message. The new one is sent, but a handler may
    still get the earlier one, or be at work on it.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REPLACED = "replaced"
    REPLACED_IN_FLIGHT = "replaced_in_flight"
    UPDATED = "updated"
    REJECTED = "rejected"


class SendOutcome(NamedTuple):
    """One message: its id and its outcome, as `Producer.send_one` states them."""

    id: str
    outcome: Sent


class WindowChanged(InvalidMessage):
    """The topic has another window than the caller knew; nothing was sent."""

    def __init__(self, window: str) -> None:
        super().__init__(f"the topic's window changed to {window!r} during the send; try again")
        self.window = window


def numbered(values: Sequence[Argument | None]) -> list[Argument]:
    """The number of values that are not None, then each with its message's number, from 1."""
    if values.count(None) == len(values):
        return [0]
    given = [(number, value) for number, value in enumerate(values, 1) if value is not None]
    return [len(given), *chain.from_iterable(given)]


@dataclass(frozen=True, eq=False, repr=False)
class Enqueue(ById[Sent]):
    """Send messages, given in columns; each envelope has its send token.

    Raises TopicFull, KeyFull, InvalidMessage.

    dues: '+<ms>' for a delay, else epoch ms in decimal; one per message, or one for all.
    ttls_ms, policies: None for a message without its own value; empty if no message has one.
    window: the topic's window by which `dues` were chosen; WindowChanged if the topic has another.
        None to skip this check: consumers check the window at hand-over anyway.
    has_local: whether an envelope may have the header of a wall time, which managers follow.
    are_ids_new: the ids were generated for this call. If the first one is known, the call is a
        repeat, so the script need not check the others.
    if_known: for a shard that was closed: leave ids alone that it does not know.
    """

    script: ClassVar[str] = "enqueue"
    steps: ClassVar[int] = 2
    group_steps: ClassVar[float | None] = 0.5
    checks_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("ids", "dues", "envelopes", "ttls_ms", "policies")
    outcomes: ClassVar[Mapping[str, Any]] = {
        "a": Sent.ACCEPTED,
        "d": Sent.DUPLICATE,
        "r": Sent.REPLACED,
        "f": Sent.REPLACED_IN_FLIGHT,
        "b": Sent.UPDATED,
        "x": Sent.REJECTED,
        "u": Elsewhere.UNKNOWN,
        "s": Elsewhere.SETTLED,
    }
    ids: Sequence[str]
    dues: Sequence[str]
    envelopes: Sequence[bytes]
    ttls_ms: Sequence[int | None] = ()
    policies: Sequence[str | None] = ()
    on_duplicate: OnDuplicate = OnDuplicate.KEEP
    are_ids_new: bool = False
    window: str | None = None
    has_local: bool = False
    if_known: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        settled = self.ids[:1] if self.are_ids_new else self.ids
        return keys.bodies(self.ids) + keys.tombstones(settled)

    @property
    def features(self) -> Features:
        found = []
        if self.if_known or not self.are_ids_new:
            found.append("ids")
        if any(KEY_END in message_id for message_id in self.ids):
            found += KEYED
        if self.window is not None:
            found.append("window")
        if self.ttls_ms.count(None) < len(self.ttls_ms):
            found.append("ttl")
        if self.policies.count(None) < len(self.policies):
            found.append("policy")
        # By this machine's clock, which may save a call: the script decides by Redis's.
        now_ms, is_now = time.time() * 1000, self.on_duplicate is OnDuplicate.UPDATE
        for due in self.dues:
            is_now = is_now or due == "+0" or (due[0] != "+" and int(due) <= now_ms)
        if is_now:
            found.append("now")
        return frozenset(found)

    def args(self) -> Sequence[Argument]:
        ids = self.ids
        kind = "known" if self.if_known else "new" if self.are_ids_new else "any"
        if kind == "any" and len(set(ids)) == len(ids):
            kind = "distinct"
        return [
            self.on_duplicate.value,
            kind,
            len(ids),
            len(self.dues),
            *self.dues,
            *self.envelopes,
            *numbered(self.ttls_ms),
            *numbered(self.policies),
            *(() if self.window is None else (self.window,)),
        ]

    @property
    def asks_older(self) -> Literal["first", "after", "never"]:
        return "never" if self.are_ids_new else "first"

    def first_of(self, shard: str, picks: Sequence[int]) -> Enqueue:
        return replace(self.part(shard, picks), if_known=True)

    def revived(self, result: Sent) -> Sent:
        return Sent.REPLACED if result is Sent.ACCEPTED else result

    def with_known_ids(self) -> Enqueue:
        return replace(self, are_ids_new=False)

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"WINDOW":
            raise WindowChanged(text(reply[1]))
        refuse_send(self, reply)


def refuse_send(call: ById[Any], reply: Sequence[Any]) -> None:
    """Raise the error for a refused send."""
    if reply[0] == b"FULL":
        raise TopicFull(
            f"topic {call.topic!r} holds {reply[1]} live messages and allows at most "
            f"{reply[2]} (its option capacity); this call sent nothing"
        )
    if reply[0] == b"KEYFULL":
        raise KeyFull(
            f"key {text(reply[1])!r} of topic {call.topic!r} has {reply[2]} live messages and may "
            f"have at most {reply[3]} (the topic's option max_per_key); this call sent nothing"
        )
    if reply[0] == b"LARGE":
        shown = shown_id(call.message_ids[reply[1] - 1])
        raise InvalidMessage(
            f"the body of message {shown!r} has {reply[2]} bytes; "
            f"topic {call.topic!r} allows at most {reply[3]} (its option max_body_bytes)"
        )
    Transition.refuse(call, reply)
