"""Generates the OpenAPI 3.1 document from the operations and their request and response types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from inspect import cleandoc
from typing import Any

import msgspec

from lisa import __version__
from lisa.gateway.api.models.base import Problem
from lisa.gateway.api.models.sending import SendRequest
from lisa.gateway.api.operations import Operation

EXAMPLES = "examples.json"
"""By operation: path, query, body, status and response of a request. docs/ records it."""

REF = "#/components/schemas/{name}"

_ONE_OF = {
    "SendRequest": ("body", "body_base64"),
    "ScheduleRequest": ("body", "body_base64"),
    "RescheduleRequest": ("due_ms", "delay_ms", "at_local"),
    "GarbageRequest": ("ids", "all"),
}

COMMON: Mapping[int, str] = {
    400: "The request is invalid; `detail` explains why.",
    401: "The token is missing or unknown.",
    403: "The token does not allow this.",
    408: "The request did not arrive within the time limit.",
    413: "The request is too large.",
    415: "The request's body is not application/json.",
    503: "The gateway is at capacity, or Redis does not respond. Try again after `Retry-After`.",
}
"""The problems that any operation may return, by status."""

_PATH: Mapping[str, Mapping[str, Any]] = {
    "topic": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "group": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "id": {"type": "string", "minLength": 1, "maxLength": 256},
    "name": {"type": "string", "minLength": 1, "maxLength": 200},
}

_ABOUT = """\
Delayed messages over HTTP. Times are epoch milliseconds. Durations are milliseconds; requests
may also write them with units, such as `30m`.

Percent-encode message ids in paths, including slashes (`a%2Fb`). Where a proxy or client changes
such a path, write `message?id=a%2Fb` instead of `messages/a%2Fb`, also before `/ack` and others.

Errors are problem documents (RFC 9457); programs should check `type`. Lists are paged: repeat the
request with `cursor` until it is null.
"""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document as a JSON-compatible dict."""
    types = [
        *(one.body for one in operations if one.body),
        *(one.reply for one in operations),
        Problem,
        SendRequest,
    ]
    unique = list(dict.fromkeys(types))
    components = _components(unique)
    # Not expressible as types: one of two fields is required.
    for name, fields in _ONE_OF.items():
        components[name]["anyOf"] = [{"required": [field]} for field in fields]
    # The batch decoder accepts any JSON because it decodes each item separately.
    messages = components["BatchRequest"]["properties"]["messages"]
    messages["items"] = {"$ref": REF.format(name=SendRequest.__name__)}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lisa", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "tags": [{"name": name} for name in dict.fromkeys(one.group for one in operations)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Not required if the gateway has no tokens configured.",
                }
            },
        },
    }


def _components(types: Sequence[Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(types, ref_template=REF)
    for name, schema in components.items():
        schema["title"] = name
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    return components


@cache
def _examples() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath(EXAMPLES).read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return found


def _operation(one: Operation) -> dict[str, Any]:
    example = _examples()[one.name]
    scope = f"Requires the scope `{one.scope}`."
    found: dict[str, Any] = {
        "operationId": one.name,
        "tags": [one.group],
        "summary": one.summary,
        "description": "\n\n".join(filter(None, (one.description, scope))),
        "parameters": [
            *_path_parameters(one, example["path"]),
            *_query_parameters(one.query, example["query"]),
        ],
        "responses": {
            **{str(status): _answered(one, status, example) for status in one.answers},
            **{
                str(status): _problem(when, status)
                for status, when in sorted({**COMMON, **one.problems}.items())
            },
        },
    }
    if one.body:
        found["requestBody"] = {
            "required": not one.is_body_optional,
            "content": {
                "application/json": {
                    "schema": _ref(one.body),
                    **({"example": example["body"]} if "body" in example else {}),
                }
            },
        }
    return found


_LINK = {"topic": "$request.path.topic", "id": "$response.body#/id"}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def _answered(one: Operation, status: int, example: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAPI 3.1 cannot describe a stream's items: the body is text, x-event-data the item type.
    is_json = one.media_type == "application/json"
    item = _ref(one.reply)
    schema = item if is_json else {"type": "string", "x-event-data": item}
    content: dict[str, Any] = {"schema": schema}
    if status == example["status"] and "response" in example:
        content["example"] = example["response"]
    found: dict[str, Any] = {
        "description": one.answers[status],
        "content": {one.media_type: content},
    }
    if one.leads_to:
        found["links"] = {name: {"operationId": name, "parameters": _LINK} for name in one.leads_to}
    return found


def _problem(when: str, status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": when,
        "content": {"application/problem+json": {"schema": _ref(Problem)}},
    }
    if status in (429, 503):
        found["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    return found


def _path_parameters(one: Operation, example: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": dict(_PATH[name]),
            "example": example[name],
        }
        for name in one.parameters
    ]


def _query_parameters(
    query: type[msgspec.Struct], example: Mapping[str, str]
) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([query], ref_template=REF)
    found = []
    for name, schema in components[query.__name__]["properties"].items():
        # Query parameters are present or absent, never null.
        one = {key: value for key, value in schema.items() if key != "default" or value is not None}
        kinds = [kind for kind in one.pop("anyOf", []) if kind.get("type") != "null"]
        for kind in kinds:
            one |= kind
        reference = one.get("$ref", "").rpartition("/")[2]
        if reference:
            one = {**components[reference], **{k: v for k, v in one.items() if k != "$ref"}}
        about = one.pop("description", "")
        parameter = {"name": name, "in": "query", "required": False, "schema": one}
        parameter["description"] = about
        if name in example:
            value = example[name]
            parameter["example"] = int(value) if one.get("type") == "integer" else value
        found.append(parameter)
    return found
