"""What an operator does: look at topics and messages, work off garbage, check and mend.

Everything here is a flow over a `Store` (see `core.flow`), so that blocking and asyncio callers
share it: `store.drive(topics.counts(store, ["orders"]))`. No step blocks the server for more than
a few milliseconds, however large a topic is.
"""
