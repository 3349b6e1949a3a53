"""Writes the types of the TypeScript client from the OpenAPI document: `make reference`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

from lisa.gateway.api import OPERATIONS
from lisa.gateway.api.description import document

TYPES = Path(__file__).parent / "typescript" / "src" / "schema.ts"

USED = (
    "SendRequest",
    "RescheduleRequest",
    "SendAnswer",
    "BatchAnswer",
    "MessageAnswer",
    "KeyAnswer",
    "KeyChangedAnswer",
    "LimitsRequest",
    "LimitsAnswer",
    "LimitsChangedAnswer",
    "LimitedKeysAnswer",
    "PullRequest",
    "PullAnswer",
    "AckAnswer",
    "RetryAnswer",
    "DeferAnswer",
    "Problem",
)
"""The schemas that the client uses; those that they refer to are added."""

NAMES: dict[str, Callable[[dict[str, Any]], str]] = {
    "array": lambda schema: f"Array<{type_of(schema['items'])}>",
    "boolean": lambda _: "boolean",
    "integer": lambda _: "number",
    "null": lambda _: "null",
    "object": lambda schema: f"Record<string, {type_of(schema['additionalProperties'])}>",
    "string": lambda _: "string",
}


def render() -> str:
    """The text of the generated file."""
    schemas = document(OPERATIONS)["components"]["schemas"]
    wanted, used = list(USED), set()
    while wanted:
        name = wanted.pop()
        used.add(name)
        wanted += set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schemas[name]))) - used
    found = [declaration(name, schema) for name, schema in schemas.items() if name in used]
    return "\n".join(["// Generated from the OpenAPI document by `make reference`.\n", *found])


def declaration(name: str, schema: dict[str, Any]) -> str:
    """An exported interface or type."""
    if "properties" not in schema:
        union = type_of(schema).replace(" | ", "\n  | ")
        return f"{comment(schema)}export type {name} =\n  | {union};\n"
    required = schema.get("required", ())
    fields = [
        f"{comment(one)}{field}{'' if field in required else '?'}: {type_of(one)};\n"
        for field, one in schema["properties"].items()
    ]
    body = indent("".join(fields), "  ")
    return f"{comment(schema)}export interface {name} {{\n{body}}}\n"


def type_of(schema: dict[str, Any]) -> str:
    """The type of a schema's values."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(json.dumps(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(type_of(one) for one in schema["anyOf"])
    return NAMES[schema["type"]](schema) if "type" in schema else "unknown"


def comment(schema: dict[str, Any]) -> str:
    """The description as a comment."""
    text = " ".join(schema.get("description", "").split())
    if len(text) < 86:
        return f"/** {text} */\n" if text else ""
    return "/**\n" + indent("\n".join(wrap(text, 90)), " * ") + "\n */\n"


if __name__ == "__main__":
    TYPES.write_text(render(), encoding="utf-8")
