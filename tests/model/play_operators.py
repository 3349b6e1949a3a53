"""What operators and other programs do, on the server and in the model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.undeclare import Undeclare
from tests.model import operating
from tests.model.draws import OPTIONS, groups, ids, topics
from tests.model.play import Play


class Operators(Play):
    """Rules for operators."""

    @rule(topic=topics, group=groups)
    def declare(self, topic: str, group: str) -> None:
        its = self.stage.topic(topic)
        call = Declare(topic, group)
        self.stage.call(call, lambda clock: operating.declare(its, group, clock))

    @rule(topic=topics, group=groups, ids=ids, drop=st.booleans(), begun=st.booleans())
    def undeclare(self, topic: str, group: str, ids: list[int], *, drop: bool, begun: bool) -> None:
        """Remove one page, as an operator's command or its repetition does."""
        self._undeclare(topic, group, self._ids(topic, ids), drop=drop, begun=begun)

    def _undeclare(
        self, topic: str, group: str, ids: list[str], *, drop: bool, begun: bool
    ) -> None:
        its = self.stage.topic(topic)
        if group not in its.all_groups:
            return
        self.stage.call(
            Undeclare(topic, group, ids, drop, begun),
            lambda clock: operating.undeclare(its, group, ids, clock, drop=drop, begun=begun),
        )

    @rule(topic=topics, values=st.fixed_dictionaries({}, optional=OPTIONS), declared=st.booleans())
    def configure(self, topic: str, values: dict[str, str | None], *, declared: bool) -> None:
        its = self.stage.topic(topic)
        self.stage.call(
            Configure(topic, values, declared=declared),
            lambda _: operating.configure(its, values, declared=declared),
        )

    @precondition(lambda self: self.dead())
    @rule(pick=st.integers(0, 5), ids=ids)
    def requeue(self, pick: int, ids: list[int]) -> None:
        topic, group = self.dead()[pick % len(self.dead())]
        its, named = self.stage.topic(topic), self._ids(topic, ids, group)
        self.stage.call(
            Requeue(topic, group, named),
            lambda clock: operating.requeue(its, self.stage.group(its, group), named, clock),
        )

    @precondition(lambda self: self.dead())
    @rule(pick=st.integers(0, 5), ids=ids)
    def purge(self, pick: int, ids: list[int]) -> None:
        topic, group = self.dead()[pick % len(self.dead())]
        its, named = self.stage.topic(topic), self._ids(topic, ids, group)
        self.stage.call(
            Purge(topic, group, named),
            lambda clock: operating.purge(its, self.stage.group(its, group), named, clock),
        )

    def dead(self) -> list[tuple[str, str]]:
        """Topics and groups with garbage."""
        topics = self.stage.topics.values()
        return [(one.name, group.name) for one in topics for group in one.groups if group.garbage]
