"""A proxy that measures every request and reply."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import hiredis

if TYPE_CHECKING:
    from types import TracebackType

AT_ONCE = 1 << 18


def bytes_of(item: Any) -> list[int]:
    """The sizes of all strings in a request or a reply."""
    if isinstance(item, bytes):
        return [len(item)]
    return [size for part in item for size in bytes_of(part)] if isinstance(item, list) else []


class Meter:
    """Serves `url` on a thread. `sizes` has one list for each request and each reply."""

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        self._server = (str(parts.hostname), int(parts.port or 0))
        self.sizes: list[list[int]] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def beyond(self, budget: int) -> int:
        """Largest excess in bytes over the budget, or over its longest string if that is larger."""
        return max(sum(one) - max(budget, *one) for one in self.sizes if one)

    async def _open(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/0"

    async def _close(self) -> None:
        self._listener.close()
        serving = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        for one in serving:
            one.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._server)
        ways = [(reader, back), (there, writer)]
        passing = [asyncio.ensure_future(self._pass_on(*way)) for way in ways]
        try:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in passing:
                one.cancel()
            for end in (writer, back):
                end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader(notEnoughData=Ellipsis)
        while data := await reader.read(AT_ONCE):
            parser.feed(data)
            while (item := parser.gets()) is not Ellipsis:
                self.sizes.append(bytes_of(item))
            writer.write(data)
            await writer.drain()
