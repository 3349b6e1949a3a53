"""Plans the restore of one message: its envelope, and its state in each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lisa.core.model.envelope import Envelope, join_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_id
from lisa.core.transitions.restore import RestoreItem, RestoreState
from lisa.pipeline.archive.fold import THROUGH


class RestoreVerdict(NamedTuple):
    """Whether and how a message can be restored.

    outcome: missing, expired or unrestorable; `missing` means restore it unless the server has it.
    reason: why it cannot be restored. item: the arguments of the restore.
    """

    outcome: str
    reason: str
    item: RestoreItem | None = None


def judge(
    row: Mapping[str, Any], groups: Sequence[str], now_ms: int, *, expire: bool = False
) -> RestoreVerdict:
    """Plan the restore of one unsettled row of MESSAGES_SCHEMA.

    row: with times in epoch ms as `due_ms` and `expires_ms`; `groups` is a list of mappings with
        group, state, attempts, due_ms, at_ms and reason; headers is a mapping or None.
    groups: the groups that are declared, or will be.
    expire: also restore a message past its ttl; without that ttl, or it would expire immediately.
    """
    if row["body"] is None or (row["token"] is None and row["kind"] is not None):
        return RestoreVerdict("unrestorable", "its envelope was never archived")
    try:
        check_id(row["id"])
    except InvalidMessage as error:
        return RestoreVerdict("unrestorable", str(error))
    found = row["groups"] or ()
    through = {one["group"] for one in found if one["state"] in THROUGH}
    due_ms = row["due_ms"]
    if due_ms is None:
        due_ms = now_ms
    states = _group_states(row, found, through, groups, due_ms)
    if states is None:
        return RestoreVerdict("unrestorable", "the groups that have not settled it no longer exist")
    # The ttl does not apply to garbage, which is kept for inspection.
    dead = bool(states) and all(one.kind == "garbage" for one in states)
    expires_ms = None if dead else row["expires_ms"]
    if expires_ms is not None and expires_ms <= now_ms:
        if not expire:
            return RestoreVerdict("expired", "past its ttl")
        expires_ms = None
    try:
        envelope = _envelope(row, "+" if through else "-")
    except InvalidMessage as error:
        return RestoreVerdict("unrestorable", str(error))
    why = next((one["reason"] for one in found if one["reason"] and _has_failed(one)), None)
    return RestoreVerdict(
        "missing",
        "",
        RestoreItem(row["id"], envelope, due_ms, expires_ms, row["policy"], states, why or ""),
    )


def _has_failed(one: Mapping[str, Any]) -> bool:
    """Whether a group's reason is that of a failure; late policies count no attempt."""
    return bool(one["attempts"]) or one["state"] == "garbage"


def _envelope(row: Mapping[str, Any], mark: str) -> bytes:
    if row["kind"] is None:  # unknown version: keep the envelope; consumers report it
        return bytes(row["body"])
    headers = dict(row["headers"] or ())
    return join_envelope(Envelope(row["token"], mark, row["kind"], headers, row["body"]))


def _group_states(
    row: Mapping[str, Any],
    found: Sequence[Mapping[str, Any]],
    through: set[str],
    declared: Sequence[str],
    due_ms: int,
) -> tuple[RestoreState, ...] | None:
    """The state in each group; () means waiting, None that no owing group is declared."""
    failed = {one["group"]: one["attempts"] for one in found if one["attempts"]}
    if row["state"] == "waiting":
        if not failed:
            return ()
        # Rescheduled after a failure: the waiting set stores no attempts, the retry sets do.
        owing = [name for name in declared if name not in through]
        return tuple(RestoreState(name, "retry", due_ms, failed.get(name, 0)) for name in owing)
    states = []
    owed = [one for one in found if one["group"] not in through]
    for one in owed:
        if one["group"] not in declared:
            continue
        if one["state"] == "garbage":
            states.append(RestoreState(one["group"], "garbage", one["at_ms"], one["attempts"]))
        else:
            due = one["due_ms"] if one["due_ms"] is not None else due_ms
            states.append(RestoreState(one["group"], "retry", due, one["attempts"]))
    if states:
        return tuple(states)
    if owed:
        return None
    # All archived groups have settled the message, but it has not ended: an event is missing, and
    # another group still needs the message. Delivering it twice is better than losing it.
    missing = [name for name in declared if name not in through]
    return tuple(RestoreState(name, "retry", due_ms) for name in missing)
