"""Sends a message again: a copy with a new id, or the edited message in place of the dead one."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from lisa.admin.shards import shards_of_id
from lisa.core.model.envelope import Envelope, decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id
from lisa.core.model.late import LateAction, LatePolicy, split_policy
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.context import GatewayContext
from lisa.gateway.page.bodies import Body
from lisa.gateway.problems import ErrorResponse
from lisa.producer import Outgoing

MOST_EDITED = 16 * 1024
"""Bytes of the longest body that can be edited.

A form without a bearer token is limited to 64 KiB, and triples most bytes.
"""


class StoredMessage(NamedTuple):
    """A stored message, ready to be sent again."""

    seen: Inspection
    envelope: Envelope
    retry: RetryPolicy | None
    late: LatePolicy | None


def is_editable(body: Body) -> bool:
    """Whether a body is complete, readable and short enough for a form."""
    is_readable = body.kind in ("JSON", "text") and not body.more
    return is_readable and len(body.text.encode("utf-8", "replace")) <= MOST_EDITED


async def stored(hub: GatewayContext, topic: str, message_id: str) -> StoredMessage:
    """A live message with its body and its own policies. Raises ErrorResponse."""
    seen = await hub.settler.look(topic, message_id)
    if not seen.envelope:
        raise ErrorResponse(
            409, "no-body", f"message {message_id!r} is settled, so its body was deleted"
        )
    retry, late = split_policy(await hub.store.drive(_policy(hub.store, topic, message_id)))
    return StoredMessage(
        seen,
        decode_envelope(seen.envelope),
        None if retry is None else RetryPolicy.decode(retry),  # an empty one: no retries
        _own_late(late),
    )


def _own_late(late: str | None) -> LatePolicy | None:
    """The late policy, unless it is one that only a schedule can have."""
    policy = LatePolicy.decode(late) if late else None
    return None if policy and policy.then is LateAction.COLLAPSE else policy


def _policy(store: Store, topic: str, message_id: str) -> Flow[str | None]:
    for shard in (yield from shards_of_id(store, topic, message_id)):
        found = yield from store.command("HGET", store.keys.topic(shard).policy, message_id)
        if found is not None:
            return text(found)
    return None


async def copy(
    hub: GatewayContext, topic: str, message_id: str, *, new_id: str, delay: str
) -> tuple[str, str]:
    """Send a copy with body, headers and policies of a message; returns its id and outcome.

    The form chooses `new_id`, so a form that is sent twice sends one message.
    """
    one = await stored(hub, topic, message_id)
    outgoing = Outgoing(
        _body(one.envelope),
        id=check_id(new_id),
        delay=delay or None,
        headers=one.envelope.headers,
        retry=one.retry,
        late=one.late,
    )
    outcome = await hub.sender.offer(topic, outgoing)
    return outcome.id, str(outcome.outcome)


async def edit(hub: GatewayContext, topic: str, message_id: str, body: str) -> str:
    """Replace a dead message by one with another body, due now; returns the outcome.

    Id, headers and policies stay the same. Nothing changes if the message has left the garbage
    or if a group still handles it. Raises InvalidMessage if a JSON body is no longer JSON.
    """
    one = await stored(hub, topic, message_id)
    states = {held.state for held in one.seen.group_states}
    if "garbage" not in states or states & {"ready", "in_flight", "retry"}:
        return "duplicate"
    outgoing = Outgoing(
        edited_body(one.envelope.kind, body),
        id=message_id,
        headers=one.envelope.headers,
        retry=one.retry,
        late=one.late,
    )
    outcome = await hub.sender.offer(topic, outgoing, OnDuplicate.KEEP_LIVE)
    return str(outcome.outcome)


def _body(envelope: Envelope) -> Any:
    """The body in the form in which producers take it."""
    if envelope.kind == "j":
        return msgspec.Raw(envelope.body)
    return envelope.body.decode() if envelope.kind == "s" else envelope.body


def edited_body(kind: str, body: str) -> Any:
    """The body of a form in the form in which producers take it. Raises InvalidMessage."""
    plain = body.replace("\r\n", "\n")  # browsers send every line break as two characters
    if kind == "s":
        return plain
    if kind != "j":
        raise InvalidMessage("a body of bytes cannot be edited here")
    try:
        return msgspec.Raw(msgspec.json.format(plain.encode(), indent=-1))
    except msgspec.DecodeError as error:
        raise InvalidMessage(f"the edited body is not JSON: {error}") from None
