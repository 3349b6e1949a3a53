"""Form bodies, as servlets read them."""

from __future__ import annotations

import re
from email.message import Message
from email.parser import BytesHeaderParser
from email.utils import collapse_rfc2231_value
from urllib.parse import parse_qsl

from starlette.requests import Request

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
MOST_FIELDS = 100
MOST_HEAD_BYTES = 1_024
"""Length of the headers of one part, which take quadratic time to parse."""


async def read_form(request: Request, *, default: str = "") -> list[tuple[str, str]]:
    """Names and values of a form in the body, in order; empty if the body is not a form.

    Spring's RestTemplate sends a multipart form if any value is not text. Uploaded files are
    ignored. default: the content type of a request that names none. Raises ValueError.
    """
    given = request.headers.get("content-type", default)
    kind = given.partition(";")[0].strip().lower()
    if kind == FORM:
        text = (await request.body()).decode("utf-8", "replace")
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
    if kind == MULTIPART:
        return _parts(given, await request.body())
    return []


def _parts(content_type: str, body: bytes) -> list[tuple[str, str]]:
    """The fields of a multipart form. Nested forms are not parsed, because that may take long.

    Raises ValueError.
    """
    if len(content_type) > MOST_HEAD_BYTES:
        raise ValueError("the content type is too long")
    whole = Message()
    whole["content-type"] = content_type
    boundary = _param(whole, "boundary", "content-type")
    if not boundary:
        raise ValueError("the multipart form has no boundary")
    limit = rb"\r\n--%s(?=--|[ \t]*\r\n)" % re.escape(boundary.encode("latin-1"))
    found = []
    parts = re.split(limit, b"\r\n" + body, maxsplit=MOST_FIELDS + 2)[1:]
    if not parts:
        raise ValueError("the multipart form has no parts")
    for number, part in enumerate(parts):
        if part.startswith(b"--"):  # the end
            break
        if number == MOST_FIELDS:
            raise ValueError("Max number of fields exceeded")
        head, _, content = part.partition(b"\r\n\r\n")
        if len(head) > MOST_HEAD_BYTES:
            raise ValueError("the headers of a part are too long")
        fields = BytesHeaderParser().parsebytes(head.lstrip())
        name = _param(fields, "name", "content-disposition")
        if name is not None and _param(fields, "filename", "content-disposition") is None:
            found.append((name, content.decode("utf-8", "replace")))
    return found


def _param(fields: Message, name: str, header: str) -> str | None:
    """A parameter of a header; None if it is missing. Raises ValueError."""
    try:
        value = fields.get_param(name, header=header)
    except TypeError as error:  # raised for continued parameters in a wrong order
        raise ValueError(f"the header {header} is invalid: {error}") from None
    return collapse_rfc2231_value(value) if value is not None else None
