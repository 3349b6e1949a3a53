"""Form bodies, as servlets read them."""

from __future__ import annotations

from email.feedparser import BytesFeedParser
from email.message import Message
from urllib.parse import parse_qsl

from starlette.requests import Request

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
MOST_FIELDS = 100


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
    parser = BytesFeedParser()
    parser.feed(b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n" + body)
    parts = parser.close().get_payload()
    if not isinstance(parts, list):
        raise ValueError("the multipart form has no parts")  # noqa: TRY004  the client's fault
    if len(parts) > MOST_FIELDS:
        raise ValueError("Max number of fields exceeded")
    found = []
    for part in parts:
        if isinstance(part, str):  # excluded by the parser, but not by its types
            continue
        name = part.get_param("name", header="content-disposition")
        if isinstance(name, str) and part.get_filename() is None:
            found.append((name, _text(part)))
    return found


def _text(part: Message) -> str:
    content = part.get_payload(decode=True)
    return content.decode("utf-8", "replace") if isinstance(content, bytes) else ""
