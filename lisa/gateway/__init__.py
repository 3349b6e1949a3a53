"""The gateway: Lisa over HTTP, for any language.

Each process has one `GatewayContext`, shared by all its interfaces: the native API (`api`), APIs
compatible with other delay queues (`compat`), web hook pushes (`push`), metrics, and the web page
(`page`). Requires the extra `gateway`.
"""
