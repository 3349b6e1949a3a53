"""Templates, and how numbers and times look. Whatever is put into a template is escaped."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import Response

from lisa.core.clock import human, ms_datetime
from lisa.gateway.page.assets import asset

__all__ = ["answer", "link", "render"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, and nothing that stands in the page itself, is run or applied."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "private, no-cache",
    "Vary": "Cookie",
    # Without any referrer a browser says "Origin: null" of this page's own forms, too.
    "Referrer-Policy": "same-origin",
}
_UNITS = re.compile(r"(\d)([a-z])")
LARGEST_DATE_MS = 253_402_300_799_999


def count(value: float | None) -> str:
    """A whole number: exact up to six digits, then in thousands, millions and so on."""
    if value is None:
        return "–"  # noqa: RUF001  the dash that tables have for "nothing"
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    power = 3 if abs(value) >= 999.5e6 else 2 if abs(value) >= 999_500 else 1
    value /= 1000**power
    return f"{value:.{0 if abs(value) >= 100 else 1}f}{'kMG'[power - 1]}"


def rate(value: float | None) -> str:
    """So many a second."""
    if value is None or value >= 100:
        return count(value)
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if value else "0"


def span(ms: float | None) -> str:
    """A duration, as short as it can be said."""
    if ms is None:
        return "–"  # noqa: RUF001  as in `count`
    if ms < 10:
        return f"{ms:.1f} ms"
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    return _UNITS.sub(r"\1 \2", human(round(ms / 1000) * 1000))


def stamp(ms: int | None) -> str:
    """An instant, to the second."""
    if ms is None:
        return "–"  # noqa: RUF001  as in `count`
    return f"{ms_datetime(max(0, min(ms, LARGEST_DATE_MS))):%Y-%m-%d %H:%M:%S}"


def exact(ms: int | None) -> str:
    """An instant, to the millisecond."""
    return stamp(ms) if ms is None else f"{stamp(ms)}.{ms % 1000:03d}"


def away(ms: int | None, now_ms: int) -> str:
    """How far away an instant is."""
    if ms is None:
        return ""
    distance = span(round(abs(ms - now_ms) / 1000) * 1000)
    if abs(ms - now_ms) < 500:
        return "now"
    return f"in {distance}" if ms > now_ms else f"{distance} ago"


def size(value: int | None) -> str:
    """Bytes for people."""
    if value is None:
        return "–"  # noqa: RUF001  as in `count`
    power = next((i for i in range(3) if value < 1024 ** (i + 1)), 3)
    amount = value / 1024**power
    return (
        f"{amount:.{0 if amount >= 100 or not power else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    )


def link(*parts: str, **query: Any) -> str:
    """An address on this gateway, each part and value quoted; what is None is left out."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(given)}" if given else path


def message_link(topic: str, message_id: str) -> str:
    """The address of a message's page. A browser would take the ids "." and ".." for folders."""
    if message_id in (".", ".."):
        return link("topics", topic, "message", id=message_id)
    return link("topics", topic, "messages", message_id)


_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_templates.filters.update(
    count=count, rate=rate, span=span, stamp=stamp, exact=exact, away=away, size=size
)
_templates.globals.update(asset=asset, link=link, message_link=message_link)


def render(template: str, /, **values: Any) -> bytes:
    """A template as bytes; hostile surrogates in foreign ids become question marks."""
    return _templates.get_template(template).render(**values).encode("utf-8", "replace")


def answer(request: Request, body: bytes, status: int = 200) -> Response:
    """A page; 304 to a browser that has exactly this one."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = {**HEADERS, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, "text/html")
