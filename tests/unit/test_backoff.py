from lisa.core.model.backoff import Backoff


def test_pauses_double_up_to_the_limit_and_reset_after_a_success() -> None:
    backoff = Backoff(1, 5)
    assert [backoff.take() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.take() == 1


def test_a_cap_also_shortens_the_following_pauses() -> None:
    backoff = Backoff(1, 60)
    assert [backoff.take(3) for _ in range(4)] == [1, 2, 3, 3]
    assert [backoff.take() for _ in range(2)] == [6, 12]


def test_the_next_pause_is_lengthened_up_to_a_limit() -> None:
    backoff = Backoff(1, 60)
    backoff.lengthen()
    assert backoff.pause_s == 2
    backoff.lengthen(3)
    assert backoff.pause_s == 3
