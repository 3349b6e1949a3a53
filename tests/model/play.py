"""Shared by the rules of all roles."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine

from tests.model.delivering import Receipt
from tests.model.sending import Send
from tests.model.stage import Stage
from tests.model.topic import Entry


class Play(RuleBasedStateMachine):
    """A stage, and the receipts and calls that the roles keep."""

    url: ClassVar[str]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(self.url, self.seen)
        self.sent: list[tuple[str, Send]] = []
        self.taken: list[tuple[str, str, str, list[Entry]]] = []
        self.receipts: list[tuple[str, Receipt]] = []

    def _ids(self, topic: str, picks: list[int], group: str | None = None) -> list[str]:
        """Ids for a call: mostly known ones of a topic, or dead ones of a group's garbage."""
        its = self.stage.topic(topic)
        known = [*its.live, *its.tombstones]
        if group is not None and group in its.all_groups:
            known = [*its.all_groups[group].garbage] or known
        known.append("unheard-of")
        return [known[pick % len(known)] for pick in picks]
