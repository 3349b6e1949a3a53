"""Static files (scripts, styles, images), held in memory.

Each URL contains a digest of the file, so browsers can cache it indefinitely.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

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


def asset(name: str) -> str:
    """The URL path of a file."""
    return f"/static/{_DIGESTS[name]}/{name}"


def routes() -> list[BaseRoute]:
    """The routes of the static files."""
    return [Route("/static/{digest}/{name:path}", _file), Route("/favicon.ico", _favicon)]


async def _file(request: Request) -> Response:
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
