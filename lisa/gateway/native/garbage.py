"""Garbage: look through it, give it a new life, or end it for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from starlette.responses import Response

from lisa.admin import garbage
from lisa.admin.garbage import Selection, groups_of
from lisa.core.flow import Flow
from lisa.core.keys import check_id
from lisa.core.store import Store
from lisa.gateway.native.cursors import read_cursor, written_cursor
from lisa.gateway.native.messages import listed
from lisa.gateway.native.models import (
    GarbageAnswer,
    GarbageQuery,
    GarbageRequest,
    MessagesAnswer,
    NoFields,
)
from lisa.gateway.native.operations import Call, answer, invalid

__all__ = ["list_", "purge", "requeue"]

MOST_LOOKED_AT = 5_000
"""Messages that one request looks at for those that match; its cursor leads on from there."""

_Action: TypeAlias = Callable[[Store, str, str, Sequence[str]], Flow[list[bool]]]


async def list_(call: Call[GarbageQuery, None]) -> Response:
    """Dead messages that match, the oldest first, a page of them."""
    query, store = call.query, call.hub.store
    selection = Selection(
        topic=call.topic, group=query.group, died_before_ms=query.died_before_ms,
        reason=query.reason,
    )  # fmt: skip
    found = await store.drive(
        garbage.listed(
            store, selection, cursor=read_cursor(query.cursor), limit=query.limit,
            most=MOST_LOOKED_AT,
        )
    )  # fmt: skip
    rows = [listed(row) for row in found.rows]
    return answer(MessagesAnswer(messages=rows, cursor=written_cursor(found.cursor)))


async def requeue(call: Call[NoFields, GarbageRequest]) -> Response:
    """Dead messages become due now, their failed attempts forgotten."""
    return await _act(call, garbage.requeue)


async def purge(call: Call[NoFields, GarbageRequest]) -> Response:
    """Dead messages end for good."""
    return await _act(call, garbage.purge)


async def _act(call: Call[NoFields, GarbageRequest], action: _Action) -> Response:
    wanted, store = call.body, call.hub.store
    if (wanted.ids is None) is not wanted.all:
        raise invalid("give either ids or all: true")
    if wanted.ids is not None and (wanted.reason or wanted.died_before_ms) is not None:
        raise invalid("reason and died_before_ms go with all: true, not with ids")
    selection = Selection(
        topic=call.topic, group=wanted.group, reason=wanted.reason,
        died_before_ms=wanted.died_before_ms,
    )  # fmt: skip
    if wanted.ids is None:
        done = await store.drive(garbage.act(store, selection, action))
        return answer(GarbageAnswer(done=done, missing=[]))
    found = await store.drive(_each(store, selection, list(dict.fromkeys(wanted.ids)), action))
    return answer(found)


def _each(
    store: Store, selection: Selection, ids: Sequence[str], action: _Action
) -> Flow[GarbageAnswer]:
    for one in ids:
        check_id(one)
    done, met = 0, [False] * len(ids)
    for group in (yield from groups_of(store, selection)):
        there = yield from action(store, selection.topic, group, ids)
        done += sum(there)
        met = [a or b for a, b in zip(met, there, strict=True)]
    missing = [one for one, was_there in zip(ids, met, strict=True) if not was_there]
    return GarbageAnswer(done=done, missing=missing)
