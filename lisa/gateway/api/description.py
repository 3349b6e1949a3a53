"""The API's description: the OpenAPI document, and the same as an HTML page.

Both are static and need no token.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import msgspec
from jinja2.filters import do_mark_safe
from starlette.responses import Response

from lisa import __version__
from lisa.gateway.api.models.base import NoFields
from lisa.gateway.api.openapi import COMMON, document
from lisa.gateway.api.operations import Call, Operation, Operations, answer

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

POLICY = (
    "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def description_operations(operations: Sequence[Operation]) -> list[Operation]:
    """The operations that serve the description of `operations`."""

    @cache
    def whole() -> bytes:
        return msgspec.json.format(msgspec.json.encode(document(operations)))

    @cache
    def page() -> bytes:
        return _page(document(operations))

    found = Operations("Description")

    @found.add("index", "GET", "/v1", answers={}, scope=None)
    async def index(_call: Call[NoFields, None]) -> Response:
        """Links to all operations and to the gateway's other pages."""
        shown = [
            {"name": one.name, "method": one.method, "path": one.path, "summary": one.summary}
            for one in operations
        ]
        return answer({"version": __version__, "links": LINKS, "operations": shown})

    @found.add("openapi", "GET", "/v1/openapi.json", answers={}, scope=None)
    async def openapi(_call: Call[NoFields, None]) -> Response:
        """The OpenAPI document."""
        return Response(whole(), media_type="application/json")

    @found.add("docs", "GET", "/v1/docs", answers={}, scope=None)
    async def docs(_call: Call[NoFields, None]) -> Response:
        """The HTML page."""
        headers = {"Content-Security-Policy": POLICY}
        return Response(page(), media_type="text/html", headers=headers)

    @found.add("style", "GET", "/v1/docs.css", answers={}, scope=None)
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
