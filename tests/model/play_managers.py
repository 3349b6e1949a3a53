"""What managers do, on the server and in the model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from lisa.core.transitions.expire import Expire
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.reclaim import FIRST, Reclaim
from lisa.core.transitions.trim import Trim
from tests.model import managing
from tests.model.draws import OCCURRENCES, consumers, groups, ids, topics
from tests.model.play import Play
from tests.model.topic import Entry
from tests.model.unknowns import Clock


class Managers(Play):
    """Rules for managers; `littered` topics contain foreign entries."""

    def __init__(self) -> None:
        super().__init__()
        self.littered: set[str] = set()

    @rule(topic=topics, limit=st.sampled_from([1, 2, 250]))
    def promote(self, topic: str, limit: int) -> None:
        """Promote, and expire the messages found past their ttl."""
        its = self.stage.topic(topic)
        expired: list[str] = []

        def model(clock: Clock) -> tuple[object, ...]:
            said = managing.promote(its, limit, clock)
            expired.extend(said.expired)
            self.seen["Promote: moved"] += said.moved
            self.seen["Promote: full"] += len(said.full)
            self.seen["Promote: expired"] += len(said.expired)
            return tuple(said)

        self.stage.call(
            Promote(topic, limit),
            model,
            lambda said: (
                said.moved,
                said.full,
                said.next_due_ms,
                said.paused,
                said.cut_short,
                said.expired,
            ),
        )
        if expired:
            self._expire(topic, expired)

    @rule(topic=topics)
    def promote_by_another(self, topic: str) -> None:
        """Several managers may run concurrently."""
        self.promote(topic, 500)

    @rule(topic=topics, ids=ids)
    def expire(self, topic: str, ids: list[int]) -> None:
        """Expire messages with a ttl, as the sweeper does."""
        with_ttl = list(self.stage.topic(topic).expiry)
        self._expire(topic, [with_ttl[n % len(with_ttl)] for n in ids if with_ttl] or ["none"])

    def _expire(self, topic: str, ids: list[str]) -> None:
        its = self.stage.topic(topic)
        newer = {OCCURRENCES[0]: OCCURRENCES[1:]}
        self.stage.call(
            Expire(topic, ids, [newer.get(one, ()) for one in ids]),
            lambda clock: managing.expire(its, ids, newer, clock),
        )

    @rule(topic=topics, group=groups, window=st.sampled_from([1, 2, 200]))
    def reclaim(self, topic: str, group: str, window: int) -> None:
        """Reclaim window after window, to the end."""
        its = self.stage.topic(topic)
        cursors: list[Entry | None] = [None]

        def model(clock: Clock) -> tuple[object, ...]:
            group_of = self.stage.group(its, group)
            said = managing.reclaim(its, group_of, cursors[-1], window, clock)
            cursors.append(said.cursor)
            self.seen["Reclaim: cleared"] += said.cleared
            return said.moved, said.cleared, said.cursor and f"({said.cursor.name}"

        while True:
            start = f"({cursors[-1].name}" if cursors[-1] else FIRST
            calls = len(cursors)
            self.stage.call(
                Reclaim(topic, group, start, "+", window),
                model,
                lambda said: (
                    [(one.id, one.due_ms, tuple(one.retried)) for one in said.moved],
                    said.cleared,
                    said.cursor,
                ),
            )
            if len(cursors) == calls or cursors[-1] is None:
                return

    @rule(topic=topics, group=groups)
    def reclaim_by_another(self, topic: str, group: str) -> None:
        self.reclaim(topic, group, 200)

    @rule(topic=topics, group=groups, names=st.lists(consumers, min_size=1, unique=True))
    def forget(self, topic: str, group: str, names: list[str]) -> None:
        its = self.stage.topic(topic)
        self.stage.call(
            Forget(topic, group, names, 0),
            lambda _: managing.forget(its, self.stage.group(its, group), names),
        )

    @rule(topic=st.sampled_from(["pair", "pair", "told"]), group=groups)
    def trim(self, topic: str, group: str) -> None:
        its = self.stage.topic(topic)
        self.stage.call(
            Trim(topic, group),
            lambda _: managing.trim(its, self.stage.group(its, group)),
            lambda said: said.removed,
        )

    @rule(group=groups, how=st.sampled_from(["unread", "held", "acknowledged"]), seen=st.booleans())
    def litter(self, group: str, how: str, *, seen: bool) -> None:
        """Another program adds a foreign entry to a ready stream; a manager may see it soon."""
        topic, ask = "pair", self.stage.store.ask
        its, ready = self.stage.topic(topic), self.stage.store.keys.topic(topic).group(group).ready
        if group not in its.declared or (how != "unread" and its.all_groups[group].unread):
            return
        self.littered.add(topic)

        def write() -> None:
            entry = ask("XADD", ready, "*", "id", "ghost", "due", 5)
            if how != "unread":
                ask("XREADGROUP", "GROUP", group, "stranger", "STREAMS", ready, ">")
            if how == "acknowledged":
                ask("XACK", ready, group, entry)

        def model(clock: Clock) -> None:
            its_group = its.all_groups[group]
            its_group.add(clock, "ghost", 5)
            entry = its_group.stream[-1]
            entry.is_ours = False
            if how != "unread":
                its_group.consumers.add("stranger")
                its_group.given = entry
            if how == "held":
                entry.holder, entry.since = "stranger", clock.written

        self.stage.step("litter", write, model, actor="")
        if seen:
            self.reclaim(topic, group, 200)
            self.trim(topic, group)
