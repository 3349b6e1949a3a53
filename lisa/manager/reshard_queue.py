"""Finish changes of the number of shards that another process may have remaining incomplete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard, Topic
from lisa.core.store.store import chunks
from lisa.manager.bulk_reads import PAGE
from lisa.manager.nodes import Nodes
from lisa.manager.sharder import Sharder
from lisa.manager.topic_errors import TopicErrors


class ReshardQueue:
    """The topics whose number of shards changed, as announced or found by a check of all topics."""

    def __init__(self, sharder: Sharder, nodes: Nodes) -> None:
        self.is_check_due = threading.Event()
        """Whether the next `finish` checks all topics, because announcements may be lost."""
        self._sharder = sharder
        self._nodes = nodes
        self._queue: SimpleQueue[Topic] = SimpleQueue()

    def put(self, topics: Iterable[Topic]) -> None:
        """Queue topics for the next `finish`."""
        for topic in topics:
            self._queue.put(topic)

    def finish(self, shards: Callable[[], Sequence[Shard]], errors: TopicErrors) -> None:
        """Finish the queued changes; failed ones are queued again and recorded in `errors`.

        shards: returns those that a check looks at. Raises LisaError if the check fails.
        """
        topics = dict.fromkeys(self._queue.get() for _ in range(self._queue.qsize()))
        if self.is_check_due.is_set():
            self.is_check_due.clear()
            try:
                for page in chunks(shards(), PAGE):
                    topics |= dict.fromkeys(self._sharder.pick(page))
            except LisaError:
                self.is_check_due.set()
                self.put(topics)
                raise
        available = self._nodes.available(list(topics))
        remaining, failed = iter(available), [topic for topic in topics if topic not in available]
        for topic in remaining:
            error = self._finish_one(topic, errors)
            if error is not None:
                failed.append(topic)
            if isinstance(error, ServerUnavailable):
                break  # other topics of the unavailable node would time out too; retry them later
        self.put([*remaining, *failed])

    def _finish_one(self, topic: Topic, errors: TopicErrors) -> LisaError | None:
        """Finish one topic's change; returns the error instead of raising it."""
        try:
            self._sharder.step(topic)
        except LisaError as error:
            errors.failed_at(self._nodes, topic, error)
            return error
        errors.passed(topic)
        return None
