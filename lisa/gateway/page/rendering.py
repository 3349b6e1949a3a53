"""Template rendering: static files, bodies, and filters that format numbers and times."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import msgspec
from markupsafe import escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lisa.core.model.clock import human, ms_datetime
from lisa.core.model.display import visible
from lisa.core.model.keys import own_id_of, shown_id
from lisa.core.model.sharding import key_of
from lisa.gateway.base_path import placed_page

DIRECTORY = Path(__file__).parent / "static"
IMMUTABLE = "public, max-age=31536000, immutable"
ONE_DAY = "public, max-age=86400"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

_FILES = {
    path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
    for path in sorted(DIRECTORY.rglob("*"))
    if path.is_file()
}
_DIGESTS = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in _FILES.items()}

DUMP_BYTES = 2_048

MOST_GROWTH = 4
"""JSON that grows beyond this factor when indented is deeply nested; it is shown unchanged."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Only scripts and styles served by this gateway are allowed; inline ones are not."""

NBSP = "\N{NO-BREAK SPACE}"
LARGEST_DATE_MS = 253_402_300_799_999


def asset(name: str) -> str:
    """The URL path of a file."""
    return f"/static/{_DIGESTS[name]}/{name}"


def static_routes() -> list[BaseRoute]:
    """The routes of the static files."""
    return [Route("/static/{digest}/{name:path}", _static_file), Route("/favicon.ico", _favicon)]


async def _static_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404, f"there is no file {name!r}")
    # A URL from another release gets the current file, without long-term caching.
    is_current = request.path_params["digest"] == _DIGESTS[name]
    return _response(name, IMMUTABLE if is_current else "no-cache")


async def _favicon(_request: Request) -> Response:
    return _response("favicon.svg", ONE_DAY)


def _response(name: str, cache_control: str) -> Response:
    headers = {"Cache-Control": cache_control, "Content-Type": TYPES[Path(name).suffix]}
    return Response(_FILES[name], headers=headers)


KINDS = {"j": "JSON", "s": "text", "b": "bytes"}


@dataclass(frozen=True, slots=True)
class Body:
    """A formatted body. `more`: only the beginning is included."""

    kind: str
    text: str
    base64: str | None
    more: bool


def format_body(kind: str, body: bytes, *, most: int, whole: bool = True) -> Body:
    """The first `most` bytes of a body, formatted. `whole`: the body is complete."""
    data, kind = body[:most], KINDS.get(kind, "bytes")
    more = not whole or len(body) > most
    if kind == "JSON" and not more:
        try:
            indented = msgspec.json.format(data, indent=2).decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            kind = "damaged JSON"
        except RecursionError:
            pass  # too deeply nested to indent: shown unchanged
        else:
            if len(indented) <= max(DUMP_BYTES, MOST_GROWTH * len(data)):
                return Body(kind, indented, None, more)
    if kind == "bytes":
        dumped = data[:DUMP_BYTES]
        return Body(
            kind, _dump(dumped), base64.b64encode(dumped).decode(), more or len(data) > DUMP_BYTES
        )
    return Body(kind, data.decode("utf-8", "replace"), None, more)


def _dump(data: bytes) -> str:
    """A hex dump: offset, hexadecimal and ASCII, sixteen bytes per line."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        readable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:06x}  {part.hex(' '):<47}  {readable}")
    return "\n".join(lines)


HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "private, no-cache",
    "Vary": "Cookie",
    # Without a referrer, browsers send "Origin: null" even for this page's own forms.
    "Referrer-Policy": "same-origin",
}
_UNITS = re.compile(r"(\d)([a-z])")


def count(value: float | None) -> str:
    """A whole number: exact below 100,000, then in thousands (k), millions (M) or billions (G)."""
    if value is None:
        return "–"  # noqa: RUF001  the dash for an empty table cell
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    power = 3 if abs(value) >= 999.5e6 else 2 if abs(value) >= 999_500 else 1
    value /= 1000**power
    return f"{value:.{0 if abs(value) >= 100 else 1}f}{'kMG'[power - 1]}"


def rate(value: float | None) -> str:
    """A rate per second."""
    if value is None or value >= 100:
        return count(value)
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if value else "0"


def span(ms: float | None) -> str:
    """A duration in milliseconds as short text, such as `1.5 s`."""
    if ms is None:
        return "–"  # noqa: RUF001  as in `count`
    if ms < 10:
        return f"{ms:.1f} ms"
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    return _UNITS.sub(r"\1 \2", human(round(ms / 1000) * 1000))


def brief(ms: float) -> str:
    """A duration in milliseconds as one number that does not wrap, such as `12 m`."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m")):
        if ms >= size:
            return f"{ms // size:.0f}{NBSP}{unit}"
    return f"{ms // 1000:.0f}{NBSP}s"


def band(from_ms: int | None, to_ms: int | None) -> str:
    """The label of a range of waiting times, such as `5-30 min`; None is unbounded."""
    if from_ms is None:
        return "overdue"
    low, low_unit = _in_unit(from_ms)
    if to_ms is None:
        return f"> {low} {low_unit}"
    high, high_unit = _in_unit(to_ms)
    if not from_ms:
        return f"< {high} {high_unit}"
    low_text = f"{low}" if low_unit == high_unit else f"{low} {low_unit} "
    return f"{low_text}\N{EN DASH}{'' if low_unit == high_unit else ' '}{high} {high_unit}"


def _in_unit(ms: int) -> tuple[int, str]:
    """A duration in the largest unit that divides it."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if ms and ms % size == 0:
            return ms // size, unit
    return ms // 1000, "s"


def stamp(ms: int | None) -> str:
    """A time in epoch milliseconds, to the second."""
    if ms is None:
        return "–"  # noqa: RUF001  as in `count`
    return f"{ms_datetime(max(0, min(ms, LARGEST_DATE_MS))):%Y-%m-%d %H:%M:%S}"


def exact(ms: int | None) -> str:
    """A time in epoch milliseconds, to the millisecond."""
    return stamp(ms) if ms is None else f"{stamp(ms)}.{ms % 1000:03d}"


def away(ms: int | None, now_ms: int) -> str:
    """The distance of a time from now, such as `in 5 s` or `2 m ago`."""
    if ms is None:
        return ""
    distance = span(round(abs(ms - now_ms) / 1000) * 1000)
    if abs(ms - now_ms) < 500:
        return "now"
    return f"in {distance}" if ms > now_ms else f"{distance} ago"


def actor(name: str) -> str:
    """An actor of the journal, such as `consumer@host:7`, in words."""
    role, _, place = name.partition("@")
    host, colon, process = place.rpartition(":")
    return f"{role} on {host}, process {process}" if colon else name


def size(value: int | None) -> str:
    """A number of bytes, such as `1.5 MiB`."""
    if value is None:
        return "–"  # noqa: RUF001  as in `count`
    power = next((i for i in range(3) if value < 1024 ** (i + 1)), 3)
    amount = value / 1024**power
    return (
        f"{amount:.{0 if amount >= 100 or not power else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    )


def link(*parts: str, **query: Any) -> str:
    """A path on this gateway, parts and values quoted; None and empty values are omitted."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given)}" if given else path


def message_link(topic: str, message_id: str) -> str:
    """The path of a message's page. Browsers would resolve the ids "." and ".." as folders."""
    if message_id in (".", ".."):
        return link("topics", topic, "message", id=message_id)
    return link("topics", topic, "messages", message_id)


def key_link(topic: str, key: str) -> str:
    """The path of a key's page."""
    if key in (".", ".."):
        return link("topics", topic, "key", key=key)
    return link("topics", topic, "keys", key)


_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: visible(value) if type(value) is str else value,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(
    actor=actor,
    brief=brief,
    count=count,
    rate=rate,
    span=span,
    stamp=stamp,
    exact=exact,
    away=away,
    size=size,
    as_is=escape,
    visible=visible,
    shown=shown_id,
    own=own_id_of,
    key_of=key_of,
)
_templates.globals.update(
    asset=asset, band=band, link=link, message_link=message_link, key_link=key_link
)


def render(template: str, /, **values: Any) -> bytes:
    """A rendered template as bytes; users' text is made visible unless filtered by `as_is`."""
    return _templates.get_template(template).render(**values).encode("utf-8", "replace")


def answer(request: Request, body: bytes, status: int = 200) -> Response:
    """An HTML response; 304 if the browser's cached copy is current."""
    body = placed_page(request.scope, body)
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = {**HEADERS, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, "text/html")
