"""garbage -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, OfGroup, new_call_id


@dataclass(frozen=True, slots=True)
class Purge(OfGroup, ById[bool]):
    """Settle dead messages for good. Returns which ids were purged.

    With `before_ms`, only messages that died at or before that time.
    """

    script: ClassVar[str] = "purge"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 1
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    outcomes: ClassVar[Mapping[str, Any]] = {"y": True, "n": False}
    topic: str
    group: str
    ids: Sequence[str]
    before_ms: int | None = None
    call_id: str = field(default_factory=new_call_id, compare=False)

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        before: Argument = "" if self.before_ms is None else self.before_ms
        return [before, len(self.ids), *self.ids]
