"""Scripts, styles and pictures: small files, held in memory.

Each is at an address that names its content, so that browsers keep it for good.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

__all__ = ["asset", "routes"]

DIRECTORY = Path(__file__).parent / "static"
FOR_GOOD = "public, max-age=31536000, immutable"
A_DAY = "public, max-age=86400"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

_FILES = {
    path.relative_to(DIRECTORY).as_posix(): path.read_bytes()
    for path in sorted(DIRECTORY.rglob("*")) if path.is_file()
}  # fmt: skip
_DIGESTS = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in _FILES.items()}


def asset(name: str) -> str:
    """The address of a file."""
    return f"/static/{_DIGESTS[name]}/{name}"


def routes() -> list[BaseRoute]:
    """Where the files are."""
    return [Route("/static/{digest}/{name:path}", _file), Route("/favicon.ico", _favicon)]


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPException(404, f"there is no file {name!r}")
    # An address of another release is answered with what there is, but not kept for good.
    known = request.path_params["digest"] == _DIGESTS[name]
    return _answer(name, FOR_GOOD if known else "no-cache")


async def _favicon(_request: Request) -> Response:
    return _answer("favicon.svg", A_DAY)


def _answer(name: str, keep: str) -> Response:
    kind = TYPES[Path(name).suffix]
    return Response(_FILES[name], headers={"Cache-Control": keep, "Content-Type": kind})
