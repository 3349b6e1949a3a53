"""All roles together, as a Hypothesis state machine."""

from __future__ import annotations

from hypothesis.stateful import initialize, invariant

from tests.model.draws import batches, leases, policies, timeouts
from tests.model.play_consumers import Consumers
from tests.model.play_managers import Managers
from tests.model.play_operators import Operators
from tests.model.play_producers import Producers
from tests.model.play_schedules import Schedules
from tests.model.sending import Outgoing, Send
from tests.model.stage import check_places


class Machine(Producers, Consumers, Managers, Operators, Schedules):
    """All roles, on three topics: one group, two, and two with a journal."""

    @initialize(batch=batches, lease=leases, timeout=timeouts, policy=policies)
    def three_topics(
        self, batch: list[Outgoing], lease: int | None, timeout: str, policy: str
    ) -> None:
        self.stage.producer.get("plain", "a")  # the first read writes the layout's version
        for name, its_groups in (("plain", "g"), ("pair", "gh"), ("told", "gh")):
            self.stage.topic(name)
            journal = {"journal": "1"} if name == "told" else {}
            self.configure(
                name, {"ack_timeout": timeout, "retry_delays": policy, **journal}, declared=False
            )
            for group in its_groups:
                self.declare(name, group)
            self._send(name, Send(self._token(), "keep", [Outgoing("a", "+0"), *batch]))
            self.take(name, "g", "c1", lease)

    def teardown(self) -> None:
        try:
            if not self.stage.has_failed:
                self._end_removals()
                self.stage.check_with_fsck(sorted(self.stage.topics.keys() - self.littered))
        finally:
            self.stage.close()

    def _end_removals(self) -> None:
        for topic in self.stage.topics.values():
            for name in sorted(topic.all_groups.keys() - topic.declared.keys()):
                self._undeclare(
                    topic.name, name, topic.all_groups[name].ids, drop=True, begun=False
                )

    @invariant()
    def every_message_has_its_place(self) -> None:
        for topic in self.stage.topics.values():
            if topic.all_groups.keys() == topic.declared.keys():
                check_places(topic)
