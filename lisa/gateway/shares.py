"""The requests of one process: what each uses of the limits, and how it was answered.

No client shuts out the others. A client is a token, or an address if the client has no token or
needs none. Its share of each limit is the setting `client-share`; without a token on a gateway with
tokens, half of that.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from starlette.types import Scope

from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Numbers, Spread, Tally, put
from lisa.core.settings import GatewayServerSettings

MOST_STREAMS = 500
"""Maximum number of open event streams per gateway process."""

SPARE_CALLS = 1_000
"""Maximum number of gRPC calls of the standard services, health and reflection."""

ANONYMOUS = 0.5
"""Part of a client's share that an address without a valid token may use."""


GONE = "499"
"""Status for a request whose client disconnected before the response (nginx's code)."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_FACES = (
    ("/v1", "native"),
    ("/lisa.v1.Lisa", "grpc"),
    ("/camellia", "camellia"),
    ("/mykit", "mykit"),
    ("/delay-queue", "delay-queue"),
    ("/metrics", "metrics"),
    ("/healthz", "health"),
)


class Crowded(Exception):
    """A limit, or the client's share of it, is reached; the client should retry later."""


class Client(NamedTuple):
    """A token or an address, and the part of each limit that it may use."""

    name: str
    part: float


class Places:
    """A limit on what exists at the same time, and the number that each client has.

    what: the noun for errors. reason: the label in metrics.
    """

    def __init__(self, most: int, what: str, reason: str) -> None:
        self.most = most
        self.total = 0
        self._what = what
        self._reason = reason
        self._taken: Counter[str] = Counter()

    def share(self, client: Client) -> int:
        """How many places the client may take."""
        return max(1, math.ceil(self.most * client.part))

    def take(self, client: Client, n: int = 1) -> None:
        """Count `n` more for the client."""
        self.total += n
        self._taken[client.name] += n

    def give(self, client: Client, n: int = 1) -> None:
        """Count `n` less for the client."""
        self.total -= n
        self._taken[client.name] -= n
        if not self._taken[client.name]:
            del self._taken[client.name]

    def is_over(self, client: Client, own: int = 0) -> bool:
        """Whether the client has taken more than its share, and more than `own`."""
        return self._taken[client.name] > max(own, self.share(client))

    def check(self, client: Client, own: int = 0) -> None:
        """Raises Crowded if more is taken than exists, or than the client's share.

        own: what the caller has taken; it fits if nothing else is taken.
        """
        is_full = self.total > max(own, self.most)
        if not is_full and not self.is_over(client, own):
            return
        current.get().reason = self._reason
        if is_full:
            raise Crowded(f"the limit of {self.most} {self._what} is reached")
        raise Crowded(f"this client's share of {self.share(client)} {self._what} is used up")

    @contextmanager
    def taken(self, client: Client, n: int = 1) -> Iterator[None]:
        """Count `n` more for the client, or less if negative, meanwhile, whatever the limit."""
        self.take(client, n)
        try:
            yield
        finally:
            self.give(client, n)


class RunningRequest:
    """One request: its client, what it holds, and how it was answered.

    held: buffered bytes. code: the status of the response. is_stream: whether the response is a
    stream of events. is_pull: whether the request waits for messages. reason: explains a 503:
    "server", or the limit reached.
    """

    __slots__ = ("_buffered", "began", "client", "code", "held", "is_pull", "is_stream", "reason")

    def __init__(self, client: Client, buffered: Places) -> None:
        self.client = client
        self.began = time.monotonic()
        self.code = GONE
        self.is_stream = False
        self.is_pull = False
        self.reason = "server"
        self._buffered = buffered
        self.held = 0

    def hold(self, n: int) -> None:
        """Hold `n` more bytes, whatever the limit."""
        self._buffered.take(self.client, n)
        self.held += n

    def drop_held(self) -> None:
        """Hold no bytes."""
        self._buffered.give(self.client, self.held)
        self.held = 0


_NO_REQUEST = RunningRequest(Client("", 1.0), Places(sys.maxsize, "buffered bytes", "bytes"))
current: ContextVar[RunningRequest] = ContextVar("request", default=_NO_REQUEST)
"""The current request."""


class Shares:
    """The limits of one gateway process. most_connections: of each port; None: no limit."""

    def __init__(self, settings: GatewayServerSettings, most_connections: int | None) -> None:
        self._part = settings.client_share
        self._proxies = [ip_network(proxy) for proxy in settings.trusted_proxies]
        connections = sys.maxsize if most_connections is None else most_connections
        self.connections = Places(connections, "connections", "requests")
        self.requests = Places(settings.max_requests, "concurrent requests", "requests")
        self.polls = Places(settings.max_polls, "waiting pulls", "waiting")
        self.streams = Places(MOST_STREAMS, "event streams", "waiting")
        self.calls = Places(SPARE_CALLS, "health and reflection calls", "requests")
        self.buffered = Places(settings.max_buffered_bytes, "buffered bytes", "bytes")
        self.stalled = Places(sys.maxsize, "stalled responses", "waiting")

    def of_token(self, name: str) -> Client:
        """The client that shows a token."""
        return Client(f"token {name}", self._part)

    def of_address(self, host: str, *, is_known: bool = True) -> Client:
        """The client at an address. A trusted proxy may use everything for its clients.

        is_known: whether the address needs no token, so that it gets a whole share.
        """
        if self._proxies and self._is_proxy(host):
            return Client(host, 1.0)
        return Client(_network(host), self._part * (1.0 if is_known else ANONYMOUS))

    def _is_proxy(self, host: str) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._proxies)

    @contextmanager
    def waiting(self, places: Places) -> Iterator[None]:
        """Count the current request in `places`, meanwhile, instead of as running.

        Raises Crowded.
        """
        client = current.get().client
        with places.taken(client):
            places.check(client)
            with self.requests.taken(client, -1):
                yield


@lru_cache(maxsize=4_096)
def _network(host: str) -> str:
    """The host's address, or its /64 network, which is what a client has in IPv6."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


class Meter:
    """Counters and histograms of one process."""

    def __init__(self) -> None:
        self.pushes = Tally()
        self.malformed = 0
        self._requests = Tally()
        self._refused = Tally()
        self._seconds: dict[str, Spread] = defaultdict(partial(Spread, STEP_SECONDS))
        for reason in ("requests", "bytes", "waiting", "server"):
            self._refused.add(0, reason)

    def count(self, scope: Scope, request: RunningRequest) -> None:
        """Count a finished request."""
        face = face_of(scope["path"])
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.add(1, face, method, request.code)
        if request.code == "503":
            self._refused.add(1, request.reason)
        if not (request.is_stream or request.is_pull):
            self._seconds[face].observe(time.monotonic() - request.began)

    def numbers(self) -> Numbers:
        """All metrics of this object."""
        numbers: Numbers = {
            "lisa_gateway_requests_total": self._requests.numbers(),
            "lisa_gateway_refused_total": self._refused.numbers(),
            "lisa_gateway_pushes_total": self.pushes.numbers(),
        }
        put(numbers, "lisa_gateway_malformed_total", self.malformed)
        for face, spread in list(self._seconds.items()):
            put(numbers, "lisa_gateway_request_seconds", spread.numbers(), face)
        return numbers


def face_of(path: str) -> str:
    """The value of the metric label `face` for a path."""
    for root, face in _FACES:
        if path == root or path.startswith(f"{root}/"):
            return face
    return "page"
