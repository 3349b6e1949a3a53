"""Errors about JSON and query parameters, which say what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

_UNKNOWN = re.compile(
    r"Object contains unknown field `(?P<name>.*)`(?P<place> - at `.*`)?\Z", re.DOTALL
)

_INVALID_VALUE = re.compile(r"Invalid enum value .* - at `\$\.(?P<field>\w+)`\Z", re.DOTALL)

_TIME_AS_NUMBER = re.compile(r"got `(int|float|bool)` - at `\$\.(start|until|at_local)`\Z")

_SYNONYMS = {
    "body": ("payload", "data", "message", "content", "value"),
    "due_ms": ("at", "at_ms", "due", "due_at", "eta", "run_at", "scheduled_at", "timestamp"),
    "delay_ms": ("delay_seconds", "delay_s", "countdown", "in"),
    "ttl_ms": ("expires", "expires_in", "expiry", "expiration"),
    "id": ("message_id", "key", "job_id", "msg_id"),
    "max": ("limit", "count", "batch", "batch_size", "max_messages", "max_number_of_messages"),
    "limit": ("max", "count", "page_size", "per_page"),
    "wait_ms": ("timeout", "timeout_ms", "block", "block_ms", "wait_time_seconds"),
    "ack_timeout_ms": ("visibility_timeout", "visibility_timeout_ms", "lease_ms", "ack_deadline"),
    "on_duplicate": ("if_exists", "unique", "conflict"),
    "receipt": ("receipt_handle", "token", "ack_id"),
}
"""What other queues call these fields."""

LONGEST_NAME = 100
"""Characters of an unknown field that are compared and shown."""

_MEANT = [(given, meant) for meant, others in _SYNONYMS.items() for given in others]


_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, pairs of surrogates, and single surrogates."""


def not_json(data: bytes, error: Exception) -> str:
    """The text for a body that cannot be decoded.

    The decoder reports an empty body, and half of a surrogate pair, as truncated data.
    """
    if not data.strip():
        return "the body is empty; send JSON"
    for found in _ESCAPES.finditer(data):
        if lone := found["lone"]:
            return f"the body is not valid UTF-8 JSON: {lone.decode()} is half of a surrogate pair"
    return f"the body is not valid UTF-8 JSON: {error}"


def mismatch(what: str, kind: Any, error: msgspec.ValidationError) -> str:
    """The text for `what`, such as "the JSON", which does not match the type `kind`."""
    unknown = _UNKNOWN.search(str(error))
    if unknown is None:
        invalid = _INVALID_VALUE.search(str(error))
        allowed = "" if invalid is None else f"; use {', '.join(_values(kind, invalid['field']))}"
        if _TIME_AS_NUMBER.search(str(error)):
            allowed = "; a time is text, as in '2026-12-24T09:00'"
        return f"{what} does not match the schema: {error}{allowed}"
    names, given = _names(kind), unknown["name"][:LONGEST_NAME]
    return f"{what} has the unknown field `{given}`{unknown['place'] or ''}; " + _hint(given, names)


def _hint(given: str, names: Sequence[str]) -> str:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", given).replace("-", "_").lower()
    near = [meant for other, meant in _MEANT if other == plain and meant in names]
    near = near or difflib.get_close_matches(plain, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"the fields are {', '.join(names)}" if names else "no fields are expected"


@cache  # each message of a batch may be invalid
def _names(kind: Any) -> Sequence[str]:
    """The names of all fields of the structs in a type, also of nested ones."""
    return sorted(set(_fields(kind)))


def _fields(kind: Any) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield field.name
            yield from _fields(field.type)
    for part in get_args(kind):
        yield from _fields(part)


@cache
def _values(kind: type[msgspec.Struct], name: str) -> Sequence[str]:
    """The values that a field may have."""
    (field,) = [one for one in msgspec.structs.fields(kind) if one.name == name]
    return [str(value) for value in _choices(field.type)]


def _choices(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        yield from (one.value for one in kind)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _choices(part)
