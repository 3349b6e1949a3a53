"""configure: writes a topic's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.transitions.configure import Configure
from tests.contract.bench import TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.contract.bench import Bench


def declare(bench: Bench, **values: str | None) -> int:
    return bench.call(Configure(TOPIC, values, declared=True))


def put(bench: Bench, **values: str | None) -> int:
    return bench.call(Configure(TOPIC, values))


def options(bench: Bench) -> Mapping[str, str]:
    found: Mapping[str, str] = bench.state().get("options", {})
    return {name: value for name, value in found.items() if not name.startswith("declared:")}


def test_a_declaration_is_written_with_its_values(bench: Bench) -> None:
    assert declare(bench, ack_timeout="5000", max_ready="7") == 2
    written = {"ack_timeout": "5000", "max_ready": "7"}
    bench.check(options=written | {f"declared:{name}": v for name, v in written.items()})
    assert declare(bench, ack_timeout="5000", max_ready="7") == 0


def test_a_new_declaration_replaces_an_old_one(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    assert declare(bench, ack_timeout="6000") == 1
    assert options(bench) == {"ack_timeout": "6000"}


def test_options_set_by_an_operator_persist(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    assert put(bench, ack_timeout="9000", capacity="3") == 2
    assert declare(bench, ack_timeout="6000", capacity="4") == 0
    assert declare(bench, ack_timeout="7000") == 0
    assert options(bench) == {"ack_timeout": "9000", "capacity": "3"}


def test_a_removed_option_follows_declarations_again(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    put(bench, ack_timeout="9000")
    assert put(bench, ack_timeout=None) == 1
    assert options(bench) == {}
    assert declare(bench, ack_timeout="6000") == 1
    assert options(bench) == {"ack_timeout": "6000"}


def test_removing_a_declaration_restores_the_default_and_keeps_operator_values(
    bench: Bench,
) -> None:
    declare(bench, ack_timeout="5000", max_ready="7")
    put(bench, max_ready="8")
    assert declare(bench, ack_timeout=None, max_ready=None) == 1
    bench.check(options={"max_ready": "8"})


def test_paused_is_never_declared(bench: Bench) -> None:
    put(bench, paused="1")
    assert declare(bench, paused="0") == 0
    bench.check(options={"paused": "1"}, stats={"pauses": 1})
    put(bench, paused=None)
    assert declare(bench, paused="1") == 0
    bench.check(stats={"pauses": 1, "resumes": 1})


def test_pauses_and_resumes_are_counted_once(bench: Bench) -> None:
    for value in ("0", "1", "1", "0", "0", None, "1"):
        put(bench, paused=value)
    bench.check(options={"paused": "1"}, stats={"pauses": 2, "resumes": 1})
