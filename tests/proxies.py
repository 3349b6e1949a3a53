"""Proxies between a client and a server that lose or delay what is said."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Accepts connections at `url`, and forwards each to the server, in both directions."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (str(parts.hostname), int(parts.port or 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def serve(self, client: socket.socket, server: socket.socket) -> None:
        """Forward between both until either ends."""
        self._start(self._forward, server, client)
        self._forward(client, server)

    def hear(self, said: bytes) -> None:
        """Called with each piece before it is forwarded."""

    def is_heard(self, source: socket.socket) -> bool:
        """Whether what this socket says is forwarded."""
        return True

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):
            while said := source.recv(1 << 16):
                if self.is_heard(source):
                    self.hear(said)
                    target.sendall(said)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += (client, server)
                self._start(self.serve, client, server)


class LossyProxy(Proxy):
    """Can drop the reply to a script that has run."""

    lost = 0
    _to_lose = 0

    def lose(self, replies: int) -> None:
        """Drop the next replies to EVALSHA, and close the connection each time."""
        self._to_lose = replies

    def serve(self, client: socket.socket, server: socket.socket) -> None:
        """Strictly in turn, as for a client without pipelining: all requests, then replies."""
        client.settimeout(0.01)
        server.settimeout(0.01)
        armed = False
        with client, server, suppress(ConnectionError, OSError):
            while True:
                with suppress(TimeoutError):
                    request = client.recv(1 << 20)
                    if not request:
                        return
                    armed = armed or (self._to_lose > 0 and b"EVALSHA" in request)
                    server.sendall(request)
                    continue
                with suppress(TimeoutError):
                    reply = server.recv(1 << 20)
                    if armed and not reply.startswith(b"-"):
                        self._to_lose -= 1
                        self.lost += 1
                        return
                    armed = False
                    if not reply:
                        return
                    client.sendall(reply)


class ForgetfulProxy(Proxy):
    """Can drop what is said on its present connections, which stay open, as firewalls do."""

    _forgotten: tuple[socket.socket, ...] = ()

    def forget(self) -> int:
        """Forget the connections; returns their number."""
        self._forgotten = tuple(self._sockets[1:])
        return len(self._forgotten) // 2

    def is_heard(self, source: socket.socket) -> bool:
        return source not in self._forgotten


class MovingProxy(Proxy):
    """An address that moves to another server, as a DNS name does; open connections stay."""

    def move(self, port: int) -> None:
        self._server = ("127.0.0.1", port)


class HoldingProxy(Proxy):
    """Holds what a client says from a given word on, until it is released."""

    def __init__(self, url: str, word: bytes) -> None:
        self._word = word
        self.holds = False
        self._released = threading.Event()
        super().__init__(url)

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        super().close()

    def hear(self, said: bytes) -> None:
        if self._word in said and not self._released.is_set():
            self.holds = True
            self._released.wait(20)


class CuttingProxy(Proxy):
    """Can lose what the server says, and then cut all connections."""

    def __init__(self, url: str) -> None:
        self._is_losing = False
        self._lost = threading.Event()
        super().__init__(url)

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Lose the server's replies from the start of the block on, and cut after it.

        The end of the block waits, up to a minute, until a reply is lost. Connections that are made
        afterwards work.
        """
        self._lost.clear()
        self._is_losing = True
        yield
        assert self._lost.wait(60), "the server said nothing"
        for one in self._sockets[1:]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._is_losing = False

    def is_heard(self, source: socket.socket) -> bool:
        """Whether it is the client, or replies pass."""
        if self._is_losing and source.getpeername() == self._server:
            self._lost.set()
            return False
        return True
