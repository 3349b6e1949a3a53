"""From a row of `messages` to what is put back: its envelope, and where it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lisa.core.envelope import Envelope, join_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.keys import check_id
from lisa.core.transitions.restore import Place, RestoreItem

__all__ = ["Verdict", "judge"]

THROUGH = ("acked", "purged", "expired")
"""A group in one of these states owes the message nothing any more."""


class Verdict(NamedTuple):
    """What may be put back, or why not: `outcome` is missing, expired or unrestorable.

    `missing` is a matter for the server: whether it is there after all.
    """

    outcome: str
    reason: str
    item: RestoreItem | None = None


def judge(
    row: Mapping[str, Any], groups: Sequence[str], now_ms: int, *, expire: bool = False
) -> Verdict:
    """Judge one row of MESSAGES_SCHEMA that is not settled.

    row: times in epoch ms under `due_ms` and `expires_ms`; `groups` its places, each a mapping
        with group, state, attempts, due_ms, at_ms and reason; headers a mapping or None.
    groups: those that are declared, or will be.
    expire: put back what is past its ttl, too: without that ttl, or it would end at once.
    """
    if row["body"] is None or (row["token"] is None and row["kind"] is not None):
        return Verdict("unrestorable", "its envelope was never archived")
    try:
        check_id(row["id"])
    except InvalidMessage as error:
        return Verdict("unrestorable", str(error))
    found = row["groups"] or ()
    through = {one["group"] for one in found if one["state"] in THROUGH}
    due_ms = row["due_ms"]
    if due_ms is None:
        due_ms = now_ms
    places = _places(row, found, through, groups, due_ms)
    if places is None:
        return Verdict("unrestorable", "the groups that owe it are not declared any more")
    # Garbage has no ttl: somebody is to look at it.
    dead = bool(places) and all(place.kind == "garbage" for place in places)
    expires_ms = None if dead else row["expires_ms"]
    if expires_ms is not None and expires_ms <= now_ms:
        if not expire:
            return Verdict("expired", "past its ttl")
        expires_ms = None
    try:
        envelope = _envelope(row, "+" if through else "-")
    except InvalidMessage as error:
        return Verdict("unrestorable", str(error))
    why = next((one["reason"] for one in found if one["reason"] and one["attempts"]), None)
    return Verdict(
        "missing", "",
        RestoreItem(
            row["id"], envelope, due_ms, expires_ms, row["policy"], places, why or ""
        ),
    )  # fmt: skip


def _envelope(row: Mapping[str, Any], mark: str) -> bytes:
    if row["kind"] is None:  # of another version: whoever reads it says so, as before the loss
        return bytes(row["body"])
    headers = dict(row["headers"] or ())
    return join_envelope(Envelope(row["token"], mark, row["kind"], headers, row["body"]))


def _places(
    row: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    through: set[str],
    declared: Sequence[str],
    due_ms: int,
) -> tuple[Place, ...] | None:
    """Where each group has it; () is in waiting, None nowhere that is still there."""
    failed = {one["group"]: one["attempts"] for one in found if one["attempts"]}
    if row["state"] == "waiting":
        if not failed:
            return ()
        # Put off after a failure: waiting has no attempts, a group's retry has, and the same due.
        owing = [name for name in declared if name not in through]
        return tuple(Place(name, "retry", due_ms, failed.get(name, 0)) for name in owing)
    places = []
    owed = [one for one in found if one["group"] not in through]
    for one in owed:
        if one["group"] not in declared:
            continue
        if one["state"] == "garbage":
            places.append(Place(one["group"], "garbage", one["at_ms"], one["attempts"]))
        else:
            due = one["due_ms"] if one["due_ms"] is not None else due_ms
            places.append(Place(one["group"], "retry", due, one["attempts"]))
    if places:
        return tuple(places)
    if owed:
        return None
    # All groups that the archive heard of are through, and yet it did not end: an event is gone,
    # and some other group still waits for it. Twice is better than never.
    missing = [name for name in declared if name not in through]
    return tuple(Place(name, "retry", due_ms) for name in missing)
