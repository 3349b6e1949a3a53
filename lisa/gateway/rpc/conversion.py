"""Converts requests to the fields of the HTTP API, and its JSON responses to Protobuf messages.

Fields have equal names in both, with three exceptions. A body is `body_json` or `body_bytes`
instead of `body` or `body_base64`. The fields of a single message stand in `message`. Options are
a map of text, and `reset` names those that are null in JSON.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from lisa.gateway.api.operations import invalid, read_json
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.rpc import lisa_pb2

M = TypeVar("M", bound=Message)

_raw_decoder = msgspec.json.Decoder(msgspec.Raw)
_PROBLEM = lisa_pb2.Problem.DESCRIPTOR.fields_by_name
_FLAGS = {"true": True, "false": False}


def parse(kind: type[M], data: bytes) -> M:
    """A Protobuf message from its bytes. Raises ErrorResponse."""
    try:
        message: M = kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"the request is not a valid {kind.__name__}: {error}") from None
    return message


def request_fields(message: Message) -> dict[str, Any]:
    """The fields of a request that are set, named as in the HTTP API. Raises ErrorResponse.

    An item of a list that has an invalid body is an ErrorResponse.
    """
    fields: dict[str, Any] = _plain(message)
    fields |= fields.pop("message", {})
    options = fields.pop("options", {})
    if clash := options.keys() & message.DESCRIPTOR.fields_by_name.keys():
        raise invalid(f"options has the unknown field `{min(clash)}`")
    reset = dict.fromkeys(fields.pop("reset", ()))
    if clash := options.keys() & reset.keys():
        raise invalid(f"the option `{min(clash)}` is in options and in reset; give one of them")
    fields |= {name: _FLAGS.get(text, text) for name, text in options.items()}
    return fields | reset


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {field.name: _plain(one) for field, one in value.ListFields()}
        if "body_json" in fields:
            fields["body"] = read_json(_raw_decoder, fields.pop("body_json").encode())
        if "body_bytes" in fields:
            fields["body_base64"] = fields.pop("body_bytes")
        return fields
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return dict(sorted(value.items()))  # an idempotency key depends on the order
    return [_item(one) for one in value]


def _item(value: Any) -> Any:
    try:
        return _plain(value)
    except ErrorResponse as error:
        return error


def response(kind: type[M], content: bytes) -> M:
    """The Protobuf message for a JSON response."""
    fields = msgspec.json.decode(content)
    if kind is lisa_pb2.OptionsAnswer:
        fields = {"options": fields}
    if "options" in fields:
        fields["options"] = {name: _text(value) for name, value in fields["options"].items()}
    for one in (fields, *fields.get("deliveries", ()), *fields.get("schedules", ())):
        if "body" in one:
            one["body_json"] = msgspec.json.encode(one.pop("body")).decode()
        if "body_base64" in one:
            one["body_bytes"] = b64decode(one.pop("body_base64"))
    message: M = kind(**fields)
    return message


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def problem(content: Mapping[str, Any]) -> lisa_pb2.Problem:
    """A problem document as a Protobuf message."""
    return lisa_pb2.Problem(**{name: one for name, one in content.items() if name in _PROBLEM})
