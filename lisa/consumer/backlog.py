"""Which of the topics that are read together have more messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lisa.consumer.member import Member
from lisa.consumer.shared_reads import Found

BUSY_READS = 4
"""After this many full reads in a row, a topic is read on its own thread."""

FEW_TOPICS = 2
"""A read that finds messages of more topics is cheap enough, even if one of them is busy."""

MOST_TURNS = 3
"""Topics that are read one by one while a slot waits."""


class Backlog:
    """What the reads of a shared reader tell about its topics.

    most_each: the most entries of a topic per read.
    """

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._topics: dict[Member, None] = {}
        self._left = 0
        self._full_reads: dict[Member, int] = {}

    def __len__(self) -> int:
        return len(self._topics)

    def keep(self, members: Collection[Member]) -> None:
        """Forget the topics that are not among the members."""
        self._topics = {one: None for one in self._topics if one in members}
        self._full_reads = {one: n for one, n in self._full_reads.items() if one in members}

    def turns(self) -> Iterator[Member]:
        """The topics to read next, one by one; none if it is time to look at the others."""
        waiting = [one for one in self._topics if not one.sub.unstarted]
        for member in waiting[: min(self._left, MOST_TURNS)]:
            self._left -= 1
            yield member

    def note(self, all_found: Sequence[Found], each: int, only: Member | None) -> list[Member]:
        """Note what a read of up to `each` entries found, of all topics or of one.

        Returns the topic that should be read on its own thread, if there is one.
        """
        full = [one.topic for one in all_found if len(one.entries) == each]
        if only is None:
            self._topics = dict.fromkeys(full)
            self._left = len(full)  # after their turns, other topics may have messages, too
        else:  # at the end, or no longer
            self._topics.pop(only, None)
            self._topics |= dict.fromkeys(full)
        if each < max(2, self._most_each) or len(all_found) > FEW_TOPICS:
            self._full_reads.clear()
            return []
        self._full_reads = {one: self._full_reads.get(one, 0) + 1 for one in full}
        return [one for one, reads in self._full_reads.items() if reads >= BUSY_READS]
