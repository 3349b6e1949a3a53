"""A client of the gateway's gRPC service for tests, with a stream that a thread reads."""

import queue
import re
import threading
from collections.abc import Sequence
from typing import Any, Self

import grpc
import pytest

from lisa.gateway.rpc import lisa_pb2 as pb
from lisa.gateway.rpc.lisa_pb2_grpc import LisaStub
from lisa.gateway.rpc.server import SERVICE
from tests.gateways import Gateway
from tests.servers import wait_until

Metadata = Sequence[tuple[str, str]]
TIMEOUT_S = 30
_ADDRESS = re.compile(r"lisa-gateway: grpc://(\S+)")


def address(gateway: Gateway) -> str:
    """Host and port of a gateway's gRPC server."""
    return next(found[1] for line in gateway.said if (found := _ADDRESS.search(line)))


def code(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed call."""
    found: grpc.StatusCode = error.code()
    return found


def problem(error: grpc.RpcError) -> Any:
    """The problem in the trailing metadata of a failed call."""
    return pb.Problem.FromString(dict(error.trailing_metadata())["lisa-problem-bin"])


class Rpc:
    """Calls of the service by name, with the fields of their requests."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub: Any = LisaStub(channel)

    def __call__(self, method: str, *, metadata: Metadata = (), **fields: Any) -> Any:
        """Make a call, once the server serves."""
        options = {"timeout": TIMEOUT_S, "wait_for_ready": True, "metadata": metadata}
        return getattr(self.stub, method)(request(method, **fields), **options)

    def error(self, method: str, *, metadata: Metadata = (), **fields: Any) -> Any:
        """The error of a call that fails."""
        with pytest.raises(grpc.RpcError) as caught:
            self(method, metadata=metadata, **fields)
        return caught.value


def request(method: str, **fields: Any) -> Any:
    """The request of a method."""
    return getattr(pb, SERVICE.methods_by_name[method].input_type.name)(**fields)


class Stream:
    """A `Consume` stream. A thread collects deliveries, settlements and the end of the stream."""

    def __init__(
        self,
        channel: grpc.Channel,
        topic: str,
        *,
        metadata: Metadata = (),
        first: pb.ConsumeRequest | None = None,
        **first_fields: Any,
    ) -> None:
        self._requests: queue.Queue[pb.ConsumeRequest | None] = queue.Queue()
        self.deliveries: list[Any] = []
        self.settled: list[Any] = []
        self.is_closing = False
        self.status: grpc.StatusCode | None = None
        opened = {"topic": topic, "ack_timeout_ms": 600_000, "group": "lisa"}
        self.send(first or pb.ConsumeRequest(open=opened, **first_fields))
        self.call = LisaStub(channel).Consume(iter(self._requests.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._thread.join(20)

    def send(self, request: pb.ConsumeRequest) -> None:
        """Send a request."""
        self._requests.put(request)

    def settle(self, delivery: Any, **action: Any) -> Any:
        """Settle a delivery and return the result."""
        settlement = pb.Settlement(receipt=delivery.receipt, **action)
        known = len(self.settled)
        self.send(pb.ConsumeRequest(settlements=[settlement]))
        wait_until(lambda: len(self.settled) > known)
        return self.settled[known]

    def finish(self) -> grpc.StatusCode | None:
        """End the requests; returns the status of the stream."""
        self._requests.put(None)
        self._thread.join(20)
        return self.status

    def cancel(self) -> None:
        """Break the stream."""
        self.call.cancel()
        self._requests.put(None)

    def wait_for_end(self) -> grpc.StatusCode | None:
        """The status of a stream that the server ends."""
        wait_until(lambda: self.status is not None)
        return self.status

    def wait_for(self, count: int) -> list[Any]:
        """Wait for this many deliveries and return all."""
        wait_until(lambda: len(self.deliveries) >= count or self.status is not None)
        return self.deliveries

    def _read(self) -> None:
        try:
            for answer in self.call:
                self.deliveries += answer.deliveries
                self.settled += answer.settled
                self.is_closing |= answer.closing
            self.status = self.call.code()
        except grpc.RpcError as error:
            self.status = code(error)
