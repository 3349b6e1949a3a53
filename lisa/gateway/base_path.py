"""Serves the gateway below a path of a proxy, such as `/lisa`.

Inside the gateway every path is as at the root. Here the base path is removed from requests, unless
the proxy has removed it, and added to the addresses in responses.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BASE = "lisa.base-path"
_LINKS = re.compile(rb'(\s(?:href|src|action|hx-get)=")/')
_REDIRECTS = (b"location", b"hx-redirect")


class BasePath:
    """ASGI middleware for the setting `base-path`."""

    def __init__(self, app: ASGIApp, base: str) -> None:
        self._app = app
        self._base = base

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its path inside the gateway."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        base = self._base.encode()

        async def send_placed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, _placed(name, value, base)) for name, value in message["headers"]]
                message = {**message, "headers": headers}
            await send(message)

        inside = {**scope, _BASE: self._base, "app_root_path": self._base}  # of base_url
        inside["path"] = inside_path(inside, scope["path"])
        inside["raw_path"] = inside_path(inside, scope["raw_path"].decode("latin-1")).encode(
            "latin-1"
        )
        await self._app(inside, receive, send_placed)


def inside_path(scope: Scope, path: str) -> str:
    """A path as a browser shows it, without the base path."""
    base = scope.get(_BASE, "")
    rest = path.removeprefix(base)
    return path if not base or rest == path or rest[:1] not in ("", "/", "?") else rest or "/"


def placed_page(scope: Scope, page: bytes) -> bytes:
    """A page whose links begin with the base path. Templates escape quotes in all values."""
    base = scope.get(_BASE, "").encode()
    return _LINKS.sub(rb"\g<1>%s/" % base, page) if base else page


def _placed(name: bytes, value: bytes, base: bytes) -> bytes:
    if name.lower() in _REDIRECTS and value.startswith(b"/"):
        return base + value
    if name.lower() == b"set-cookie":
        return value.replace(b"; Path=/", b"; Path=%s" % base)
    return value
