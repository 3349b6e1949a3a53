"""garbage -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["Purge"]


@dataclass(frozen=True, slots=True)
class Purge(ById[bool]):
    """End dead messages for good; answers which ids were purged.

    With `before_ms` only those that died at or before that instant.
    """

    script: ClassVar[str] = "purge"
    steps: ClassVar[int] = 4
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    topic: str
    group: str
    ids: Sequence[str]
    before_ms: int | None = None

    @property
    def own_group(self) -> str:
        return self.group

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        before: Argument = "" if self.before_ms is None else self.before_ms
        return [before, len(self.ids), *self.ids]

    @property
    def message_ids(self) -> Sequence[str]:
        return self.ids

    def parse(self, reply: Sequence[Any]) -> list[bool]:
        return [letter == "y" for letter in letters(reply[0])]
