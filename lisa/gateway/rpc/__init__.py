"""The operations of `/v1` over gRPC, and a stream that delivers messages; the extra `grpc`.

Each call runs as an ASGI request through the limits middleware and the handlers of the HTTP API.
`transport` turns calls into requests, and Protobuf messages into JSON and back. `consume` is the
stream, and `server` starts and stops everything.

`make proto` generates `lisa_pb2.py`, `lisa_pb2.pyi` and `lisa_pb2_grpc.py` from `lisa.proto`.
"""
