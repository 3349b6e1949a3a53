"""Administration: inspect topics and messages, empty garbage, check and repair the data.

The functions are flows over a `Store` (see `core.redis.flow`), shared by blocking and asyncio
callers: `store.drive(topics.counts(store, ["orders"]))`. No step blocks the server for more than
a few milliseconds, regardless of a topic's size.
"""
