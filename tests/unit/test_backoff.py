"""Pauses between attempts."""

from __future__ import annotations

from redis import exceptions

from lisa.core.model.backoff import MOVING_S, Backoff, longest_after
from lisa.core.redis.errors import translated
from lisa.core.redis.patience import Patience


def test_pauses_double_up_to_a_limit_and_reset_after_a_success() -> None:
    backoff = Backoff(1, 60)
    assert [backoff.take(3) for _ in range(4)] == [1, 2, 3, 3]
    assert [backoff.take() for _ in range(5)] == [6, 12, 24, 48, 60]
    backoff.reset()
    assert backoff.take() == 1
    backoff.lengthen(3)
    assert backoff.pause_s == 3


def test_the_end_of_a_slot_s_move_is_noticed_sooner_than_a_server_that_returns() -> None:
    for error, longest_s in (
        (exceptions.TryAgainError("TRYAGAIN Multiple keys request during rehashing of slot"), 0.1),
        (exceptions.ResponseError("TRYAGAIN keys are on two nodes"), 0.1),
        (exceptions.ConnectionError("refused"), 0.5),
        (exceptions.ResponseError("WRONGTYPE not a stream"), 5.0),
    ):
        assert longest_after(translated(error, "redis")) == longest_s
    patience = Patience(100)
    pauses = [patience.next_pause(MOVING_S) for _ in range(10)]
    assert all(pause is not None and pause <= MOVING_S for pause in pauses)
    others = [patience.next_pause() for _ in range(10)]
    assert max(pause for pause in others if pause) > MOVING_S
