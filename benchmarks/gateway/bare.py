"""The same web server without a queue: decodes a send and answers."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Send(msgspec.Struct):
    """The fields of a send in this benchmark."""

    body: Any
    delay_ms: int = 0


_decoder = msgspec.json.Decoder(Send)


async def accept(request: Request) -> Response:
    """Answer like the gateway's send operation."""
    _decoder.decode(await request.body())
    content = msgspec.json.encode({"id": "0123456789abcdefghijkl", "outcome": "accepted"})
    return Response(content, 201, media_type="application/json")


app = Starlette(routes=[Route("/v1/topics/{topic}/messages", accept, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        log_level="error",
        access_log=False,
    )
