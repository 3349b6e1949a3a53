"""What happens to schedules, on the server and in the model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from lisa.core.model.envelope import encode_envelope
from lisa.core.model.recurring.define import define
from lisa.core.model.recurring.definition import Record
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from tests.model import scheduling
from tests.model.draws import FAR, HOUR, ids, policies, topics
from tests.model.play import Play
from tests.model.scheduling import Change, Made

DEFINITION = define("", {"every": "1h"})
OVERLAPS = ("allow", "allow", "skip", "queue_one", "replace_unstarted")
made = st.builds(
    Made,
    st.sampled_from("aabbcd"),
    st.sampled_from([1_000, 2_000, int(FAR)]),
    st.sampled_from([None, None, 0, int(HOUR)]),
    st.one_of(st.none(), policies),
)


class Schedules(Play):
    """Rules for managers at ticks, and for edits."""

    changes = 0

    @rule(
        topic=topics,
        name=st.sampled_from("pq"),
        is_current=st.sampled_from([True, True, True, False]),
        creates=st.lists(made, max_size=2, unique_by=lambda one: one.id),
        drops=ids,
        earlier=ids,
        overlap=st.sampled_from(OVERLAPS),
        how=st.sampled_from(["ticks", "ticks", "drops", "swaps", "ends", "removes"]),
    )
    def change_a_schedule(
        self,
        topic: str,
        name: str,
        *,
        is_current: bool,
        creates: list[Made],
        drops: list[int],
        earlier: list[int],
        overlap: str,
        how: str,
    ) -> None:
        its = self.stage.topic(topic)
        self.changes += 1
        found = its.schedules.get(name, "").partition(" ")[0]
        tick = None if how in ("ends", "removes") else 1_000 * self.changes
        record, held = (
            Record(version=self.changes, tick=one, made_ms=1, definition=DEFINITION).encode()
            for one in (tick, int(FAR))
        )
        dropped = set(self._ids(topic, drops)) if how in ("drops", "swaps") else set()
        call = Change(
            name,
            found if is_current else "9.9.9",
            "" if how == "removes" else record.decode(),
            tick,
            f"s{self.changes:07d}",
            [] if how == "removes" else creates,
            sorted(dropped),
            sorted(set(self._ids(topic, earlier)) - dropped),
            overlap,
            held.decode(),
            int(FAR),
            swaps=how == "swaps",
        )
        envelope = encode_envelope(call.token, "")
        self.stage.call(
            Schedule(
                topic,
                name,
                call.fence,
                call.record.encode(),
                call.score,
                creates=[
                    NewOccurrence(one.id, one.due, envelope, one.ttl, one.policy)
                    for one in call.creates
                ],
                drops=call.drops,
                earlier=call.earlier,
                overlap=overlap,
                held=call.held.encode(),
                held_score=call.held_score,
                swaps=call.swaps,
            ),
            lambda clock: scheduling.change(its, call, clock),
            tuple,
        )
