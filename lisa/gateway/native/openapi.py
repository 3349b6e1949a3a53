"""The OpenAPI 3.1 document, from the table of operations and the types of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any

import msgspec

from lisa import __version__
from lisa.admin.messages import State
from lisa.gateway.native.models import Problem, SendRequest
from lisa.gateway.native.operations import Operation
from lisa.producer.found import State as Stands

__all__ = ["COMMON", "document"]

REF = "#/components/schemas/{name}"

# Two enumerations of one name, which msgspec therefore writes out in full.
_NAMES = {f"{kind.__module__}.{kind.__qualname__}": name
          for kind, name in ((State, "LiveState"), (Stands, "State"))}  # fmt: skip

_ONE_OF = {
    "SendRequest": ("body", "body_base64"),
    "RescheduleRequest": ("due_ms", "delay_ms"),
    "GarbageRequest": ("ids", "all"),
}

COMMON: Mapping[int, str] = {
    400: "The request cannot be accepted as it is; `detail` says what is wrong.",
    401: "There is no token, or none that is known here.",
    403: "The token does not allow this.",
    408: "The request took too long to arrive.",
    413: "The request is too large.",
    415: "The request's body is not application/json.",
    503: "The gateway is full, or Redis does not answer: come again after `Retry-After`.",
}
"""The problems that any operation may answer."""

_PATH: Mapping[str, Mapping[str, Any]] = {
    "topic": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "group": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
    "id": {"type": "string", "minLength": 1, "maxLength": 256},
}

_ABOUT = """\
Delayed messages over HTTP. Times are epoch milliseconds, durations milliseconds.

An id in a path is one part of it: percent-encode it, slashes too (`a%2Fb`). An error is a problem
(RFC 9457); its `type` is what programs go by. Lists come in pages: ask again with `cursor` until
it is null.
"""


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The whole document."""
    types = [
        *(one.body for one in operations if one.body),
        *(kind for one in operations for kind, _ in one.answers.values()),
        Problem, SendRequest,
    ]  # fmt: skip
    unique = list(dict.fromkeys(types))
    components = _components(unique)
    # Types cannot say it: one of two fields has to be there.
    for name, fields in _ONE_OF.items():
        components[name]["anyOf"] = [{"required": [field]} for field in fields]
    # Its items are read one by one, so to the decoder they are any JSON.
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
                    "type": "http", "scheme": "bearer",
                    "description": "Not asked for where the gateway has no tokens.",
                }
            },
        },
    }  # fmt: skip


def _components(types: Sequence[Any]) -> dict[str, Any]:
    _, found = msgspec.json.schema_components(types, ref_template=REF)
    text = msgspec.json.encode(found).decode()
    for long, name in _NAMES.items():
        text = text.replace(long, name)
    components: dict[str, Any] = msgspec.json.decode(text)
    for name, schema in components.items():
        schema["title"] = name
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    return components


def _operation(one: Operation) -> dict[str, Any]:
    scope = f"Needs the scope `{one.scope}`." if one.scope else "Any token will do."
    found: dict[str, Any] = {
        "operationId": one.name,
        "tags": [one.group],
        "summary": one.summary,
        "description": "\n\n".join(filter(None, (one.description, scope))),
        "parameters": [*_path_parameters(one), *_query_parameters(one.query)],
        "responses": {
            **{str(status): _answered(one, kind, when)
               for status, (kind, when) in one.answers.items()},
            **{str(status): _problem(when, status)
               for status, when in sorted({**COMMON, **one.problems}.items())},
        },
    }  # fmt: skip
    if one.body:
        found["requestBody"] = {
            "required": not one.is_body_optional,
            "content": {"application/json": {"schema": _ref(one.body)}},
        }
    return found


_LINK = {"topic": "$request.path.topic", "id": "$response.body#/id"}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def _answered(one: Operation, kind: Any, when: str) -> dict[str, Any]:
    # OpenAPI 3.1 has no word for a stream's items: the whole is text, an event's data has a type.
    is_json = one.media_type == "application/json"
    schema = _ref(kind) if is_json else {"type": "string", "x-event-data": _ref(kind)}
    found = {"description": when, "content": {one.media_type: {"schema": schema}}}
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


def _path_parameters(one: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": dict(_PATH[name])}
        for name in one.parameters
    ]


def _query_parameters(query: type[msgspec.Struct]) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([query], ref_template=REF)
    found = []
    for name, schema in components[query.__name__]["properties"].items():
        # In a query nothing is null: a parameter is there, or it is not.
        one = {key: value for key, value in schema.items() if key != "default" or value is not None}
        kinds = [kind for kind in one.pop("anyOf", []) if kind.get("type") != "null"]
        for kind in kinds:
            one |= kind
        reference = one.get("$ref", "").rpartition("/")[2]
        if reference:
            one = {**components[reference], **{k: v for k, v in one.items() if k != "$ref"}}
        about = one.pop("description", "")
        found.append({"name": name, "in": "query", "required": False, "schema": one,
                      "description": about})  # fmt: skip
    return found
