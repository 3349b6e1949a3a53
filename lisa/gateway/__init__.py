"""The gateway: Lisa over HTTP and gRPC, for any language. Requires the extra `gateway`.

A request passes `serving` (connections), `limits` (what its client may use) and Starlette's router
(`app`) to one of the interfaces: the native API (`api`), the same operations over gRPC (`rpc`),
APIs compatible with other delay queues (`compat`), `metrics`, or the web page (`page`). They share
one `GatewayContext` of their process. Messages are handed out by `pulls`, or to web hooks by
`push`, and settled by `settling`.
"""
