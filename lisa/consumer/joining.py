"""How a reader joins its topic's group, and what it does once the group is gone."""

from __future__ import annotations

from lisa.consumer.intake import Intake
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import begin_round
from lisa.core.model.backoff import FIRST_S, Backoff

LOOK_AGAIN_S = 1.0
"""How often a paused topic, or a topic without a group, is checked."""


class Joining:
    """Used on the reader's thread. All methods raise LisaError."""

    def __init__(self, sub: Subscription, intake: Intake) -> None:
        self._sub = sub
        self._member = sub.membership
        self._intake = intake

    def join(self) -> None:
        """Join the group, or wait until the topic has one."""
        member = self._member
        if member.is_former_shard():
            self._intake.pause(LOOK_AGAIN_S)  # the heartbeat will close this subscription
            return
        if member.join():
            return
        member.ask_for_group()
        backoff = Backoff(longest_s=LOOK_AGAIN_S)
        while not self._sub.closing.is_set() and not member.has_groups():
            begin_round()
            self._intake.pause(backoff.take())

    def end(self, error: BaseException) -> None:
        """After the group was removed: drop its deliveries, or join again if the server lost it."""
        was_lost = self._member.was_lost()
        self._intake.drop_unopened()
        if was_lost:
            self._join_again()
            return
        self._member.end(error)
        self._intake.drop_all()

    def rejoin(self) -> None:
        """Wait for a removed group to be declared again."""
        self._intake.pause(LOOK_AGAIN_S)
        if self._sub.closing.is_set():
            return
        if self._member.was_lost():
            self._join_again()
        else:
            self._member.rejoin()

    def _join_again(self) -> None:
        self._member.reset()
        self._intake.pause(FIRST_S)
