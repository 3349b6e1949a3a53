"""The API's description: the OpenAPI 3.1 document, and the same as an HTML page.

Both follow from the operations and their types, are static, and need no token.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from inspect import cleandoc
from typing import Any

import jinja2
import msgspec
from jinja2.filters import do_mark_safe
from starlette.responses import Response

from lisa import __version__
from lisa.core.model.keys import MAX_ID_BYTES
from lisa.gateway.api.operations import Call, Operation, Operations, answer
from lisa.gateway.api.sending import SendRequest
from lisa.gateway.api.types import LONGEST_ID, NoFields, Problem

EXAMPLES = "examples.json"
"""By operation: path, query, body, status and response of a request. docs/ records it."""

REF = "#/components/schemas/{name}"

_ONE_OF = {
    "SendRequest": ("body", "body_base64"),
    "ScheduleRequest": ("body", "body_base64"),
    "RescheduleRequest": ("due_ms", "delay_ms", "at_local"),
    "RescheduleKeyRequest": ("due_ms", "delay_ms", "shift_ms"),
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
    "id": {"type": "string", "minLength": 1, "maxLength": LONGEST_ID},
    "key": {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES},
    "name": {"type": "string", "minLength": 1, "maxLength": 200},
}

_ABOUT = """\
Delayed messages over HTTP. Times are epoch milliseconds. Durations are milliseconds; requests
may also write them with units, such as `30m`.

Percent-encode message ids and keys in paths, including slashes (`a%2Fb`). Where a proxy or client
changes such a path, write `message?id=a%2Fb` instead of `messages/a%2Fb`, also before `/ack` and
others, and `key?key=a%2Fb` instead of `keys/a%2Fb`.

The `id` in responses is that of the message on its topic. If the message has a `key`, it is the
key, the character U+001F (`%1F` in paths), and the id that was sent or generated.

Errors are problem documents (RFC 9457); programs should check `type`. Lists are paged: repeat the
request with `cursor` until it is null.
"""

POLICY = (
    "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document as a JSON-compatible dict."""
    types = [
        *(operation.body for operation in operations if operation.body),
        *(operation.reply for operation in operations),
        Problem,
        SendRequest,
    ]
    unique = list(dict.fromkeys(types))
    _, components = msgspec.json.schema_components(unique, ref_template=REF)
    for name, schema in components.items():
        schema["title"] = name
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    # Not expressible as types: one of two fields is required.
    for name, fields in _ONE_OF.items():
        components[name]["anyOf"] = [{"required": [field]} for field in fields]
    # The batch decoder accepts any JSON because it decodes each item separately.
    messages = components["BatchRequest"]["properties"]["messages"]
    messages["items"] = {"$ref": REF.format(name=SendRequest.__name__)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lisa", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "tags": [
            {"name": name} for name in dict.fromkeys(operation.group for operation in operations)
        ],
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


@cache
def _examples() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = msgspec.json.decode(_file(EXAMPLES))
    return found


def _operation(operation: Operation) -> dict[str, Any]:
    example = _examples()[operation.name]
    scope = f"Requires the scope `{operation.scope}`."
    found: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.group],
        "summary": operation.summary,
        "description": "\n\n".join(filter(None, (operation.description, scope))),
        "parameters": [
            *_path_parameters(operation, example["path"]),
            *_query_parameters(operation.query, example["query"]),
        ],
        "responses": {
            **{str(status): _answered(operation, status, example) for status in operation.answers},
            **{
                str(status): _problem(when, status)
                for status, when in sorted({**COMMON, **operation.problems}.items())
            },
        },
    }
    if operation.body:
        found["requestBody"] = {
            "required": not operation.is_body_optional,
            "content": {
                "application/json": {
                    "schema": _ref(operation.body),
                    **({"example": example["body"]} if "body" in example else {}),
                }
            },
        }
    return found


_LINK = {"topic": "$request.path.topic", "id": "$response.body#/id"}


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def _answered(operation: Operation, status: int, example: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAPI 3.1 cannot describe a stream's items: the body is text, x-event-data the item type.
    is_json = operation.media_type == "application/json"
    item = _ref(operation.reply)
    schema = item if is_json else {"type": "string", "x-event-data": item}
    content: dict[str, Any] = {"schema": schema}
    if status == example["status"] and "response" in example:
        content["example"] = example["response"]
    found: dict[str, Any] = {
        "description": operation.answers[status],
        "content": {operation.media_type: content},
    }
    if operation.leads_to:
        found["links"] = {
            name: {"operationId": name, "parameters": _LINK} for name in operation.leads_to
        }
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


def _path_parameters(operation: Operation, example: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": dict(_PATH[name]),
            "example": example[name],
        }
        for name in operation.parameters
    ]


def _query_parameters(
    query: type[msgspec.Struct], example: Mapping[str, str]
) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([query], ref_template=REF)
    found = []
    for name, schema in components[query.__name__]["properties"].items():
        # Query parameters are present or absent, never null.
        described = {
            key: value for key, value in schema.items() if key != "default" or value is not None
        }
        for kind in described.pop("anyOf", []):
            described |= kind if kind.get("type") != "null" else {}
        if reference := described.pop("$ref", "").rpartition("/")[2]:
            described = components[reference] | described
        parameter = {"name": name, "in": "query", "required": False, "schema": described}
        parameter["description"] = described.pop("description", "")
        if name in example:
            value = example[name]
            parameter["example"] = int(value) if described.get("type") == "integer" else value
        found.append(parameter)
    return found


LINKS = {
    "openapi": "/v1/openapi.json",
    "docs": "/v1/docs",
    "topics": "/v1/topics",
    "consumers": "/v1/consumers",
    "managers": "/v1/managers",
    "health": "/healthz",
    "metrics": "/metrics",
    "page": "/",
}


def description_operations(operations: Sequence[Operation]) -> list[Operation]:
    """The operations that serve the description of `operations`."""

    @cache
    def whole() -> bytes:
        return msgspec.json.format(msgspec.json.encode(document(operations)))

    @cache
    def page() -> bytes:
        return _page(document(operations))

    found = Operations("Description")

    @found.add("GET", "/v1", {}, scope=None)
    async def index(_call: Call[NoFields, None]) -> Response:
        """Links to all operations and to the gateway's other pages."""
        shown = [
            {
                "name": operation.name,
                "method": operation.method,
                "path": operation.path,
                "summary": operation.summary,
            }
            for operation in operations
        ]
        return answer({"version": __version__, "links": LINKS, "operations": shown})

    @found.add("GET", "/v1/openapi.json", {}, scope=None)
    async def openapi(_call: Call[NoFields, None]) -> Response:
        """The OpenAPI document."""
        return Response(whole(), media_type="application/json")

    @found.add("GET", "/v1/docs", {}, scope=None)
    async def docs(_call: Call[NoFields, None]) -> Response:
        """The HTML page."""
        headers = {"Content-Security-Policy": POLICY}
        return Response(page(), media_type="text/html", headers=headers)

    @found.add("GET", "/v1/docs.css", {}, scope=None)
    async def style(_call: Call[NoFields, None]) -> Response:
        """The page's style sheet."""
        return Response(_file("docs.css"), media_type="text/css")

    return found


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _page(whole: dict[str, Any]) -> bytes:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"kind": _kind, "prose": _prose, "json": _json}
    found = environment.from_string(_file("docs.html")).render(
        whole=whole,
        schemas=whole["components"]["schemas"],
        common={str(status): when for status, when in COMMON.items()},
        operations=[
            (path, method.upper(), operation)
            for path, methods in whole["paths"].items()
            for method, operation in methods.items()
        ],
    )
    return found.encode()


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _prose(text: str) -> str:
    """Escaped text with backticks turned into code elements."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return do_mark_safe(marked)


def _kind(schema: dict[str, Any]) -> str:
    """A short description of a schema, such as `list of string`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(map(_kind, schema[word]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    low = schema.get("minimum", schema.get("minLength", schema.get("minItems")))
    high = schema.get("maximum", schema.get("maxLength", schema.get("maxItems")))
    return kind if low is None and high is None else f"{kind}, {low or 0} to {high}"
