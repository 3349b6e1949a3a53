"""Metrics for Prometheus: definitions, collection, and output.

`families` defines every metric. `topics` reads the state of all topics from Redis, for any role.
Each role counts its own events in its own module (such as `lisa.manager.engine`) as `Numbers`.
`sharing` sums them over the processes of a role, and `page` writes them as text.
"""
