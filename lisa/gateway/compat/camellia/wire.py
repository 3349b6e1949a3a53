"""Camellia's wire format: parameters as Spring parses them, JSON as Jackson and fastjson write it.

Spring accepts parameters from the query and the form. A missing or ill-typed parameter gets HTTP
400 before the queue is called; errors from the queue get HTTP 200 with a code in the body.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lisa.gateway.compat.forms import MOST_FIELDS, read_form

SUCCESS = 200
PARAM_WRONG = 400
NOT_EXISTS = 404
UNKNOWN = 500

JSON = "application/json"

_DECIMAL = re.compile(r"[+-]?[0-9]+\Z")
_HEX = re.compile(r"(-?)(?:0[xX]|#)([0-9a-fA-F]+)\Z")
_TRUE = frozenset(("true", "on", "yes", "1"))
_FALSE = frozenset(("false", "off", "no", "0"))


class BadParameter(Exception):
    """A parameter is missing or has the wrong type."""


class Parameters:
    """The parameters of one request, the query before the form; of duplicates, the first counts."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    @classmethod
    async def of(cls, request: Request) -> Parameters:
        """Read query and form parameters. Raises BadParameter."""
        try:
            pairs = parse_qsl(request.url.query, keep_blank_values=True, max_num_fields=MOST_FIELDS)
            if request.method == "POST":
                pairs += await read_form(request)
        except ValueError as error:
            raise BadParameter(
                f"the parameters, at most {MOST_FIELDS}, cannot be parsed: {error}"
            ) from None
        return cls(dict(reversed(pairs)))

    def text(self, name: str) -> str:
        """A required text, which may be empty. Raises BadParameter."""
        try:
            return self._values[name]
        except KeyError:
            raise _missing(name) from None

    def optional_text(self, name: str) -> str | None:
        """An optional text."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, bits: int = 64) -> int:
        """A Java long, or int with bits=32; by default `default`. Raises BadParameter."""
        given = "".join(self._values.get(name, "").split())
        if not given:
            if default is None:
                raise _missing(name)
            return default
        if _DECIMAL.match(given) and len(given) <= 20:
            number = int(given)
        elif (found := _HEX.match(given)) and len(given) <= 20:
            number = int(found[1] + found[2], 16)
        else:
            raise BadParameter(f"parameter '{name}' must be an integer, not {given[:40]!r}")
        if not -(1 << bits - 1) <= number < 1 << bits - 1:
            raise BadParameter(f"parameter '{name}' is out of range: {number}")
        return number

    def boolean(self, name: str, *, default: bool | None = None) -> bool:
        """A boolean; if missing or empty, the default. Raises BadParameter."""
        given = self._values.get(name, "").strip().lower()
        if not given:
            if default is None:
                raise _missing(name)
            return default
        if given not in _TRUE | _FALSE:
            raise BadParameter(f"parameter '{name}' must be true or false, not {given[:40]!r}")
        return given in _TRUE


def _missing(name: str) -> BadParameter:
    return BadParameter(f"Required parameter '{name}' is not present.")


def answer(
    code: int, *, status: int = 200, headers: Mapping[str, str] | None = None, **fields: Any
) -> Response:
    """A response as Jackson writes it, with nulls. status: the HTTP status."""
    body = msgspec.json.encode({"code": code, **fields})
    return Response(body, status, headers, media_type=JSON)


def compact(found: Sequence[msgspec.Struct]) -> bytes:
    """A pull response as fastjson writes it: sorted by field name, without nulls and `msg`."""
    rows = [
        {name: value for name, value in msgspec.to_builtins(one).items() if value is not None}
        for one in found
    ]
    return msgspec.json.encode({"code": SUCCESS, "delayMsgList": rows}, order="sorted")


def bad_request(request: Request, error: BadParameter) -> Response:
    """HTTP 400 in Spring's format."""
    content = {
        "timestamp": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
        "status": 400,
        "error": "Bad Request",
        "message": str(error),
        "path": request.url.path,
    }
    return Response(msgspec.json.encode(content), 400, media_type=JSON)
