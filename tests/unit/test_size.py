"""`benchmarks.size`: costs from a report, the capacity model, and its check by simulation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from redis.crc import key_slot

from benchmarks.size import (
    MEASURED,
    SLOTS,
    Costs,
    PeakLoad,
    best_placement,
    main,
    placements,
    redis_us,
    simulate,
    size,
    sized,
)
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import Topic
from tests.generators import generator
from tests.servers import ROOT

ORDERS = Topic("orders")
PEAK = PeakLoad(
    topic=ORDERS,
    rate=10_000.0,
    body=1_000,
    waiting=1_000_000.0,
    batch=100,
    groups=1,
    retention_s=60.0,
    round_trip_us=500.0,
    busy=0.6,
    memory=32 * 2**30,
)


@pytest.mark.parametrize(("primaries", "round_trip_ms", "batch"), [(1, 0.1, 1), (12, 2.0, 100)])
def test_a_simulation_confirms_the_model(primaries: int, round_trip_ms: float, batch: int) -> None:
    peak = replace(PEAK, batch=batch, round_trip_us=round_trip_ms * 1000)
    found = sized(generator("generate_scale").full(peak, primaries), MEASURED, primaries)
    simulated = simulate(found.load, MEASURED, messages=20_000)
    assert simulated.rate == pytest.approx(found.load.rate, rel=0.05)
    assert simulated.busy == pytest.approx(found.redis, rel=0.1)
    for rate, groups in ((100, 1), (3_000, 3)):
        below = sized(replace(PEAK, rate=float(rate), groups=groups), MEASURED, 1)
        simulated = simulate(below.load, MEASURED)
        assert simulated.busy == pytest.approx(below.redis, rel=0.4)
        assert simulated.busy <= below.redis * 1.05, "the model is on the safe side"
    one = sized(replace(PEAK, round_trip_us=round_trip_ms * 1000), MEASURED, 1)
    burst = replace(one.load, rate=1e9, batch=0, interval_us=0.0)
    drained = simulate(burst, MEASURED, messages=20_000)
    assert drained.rate == pytest.approx(one.drain, rel=0.25)


def test_it_takes_as_many_primaries_as_needed() -> None:
    found = size(replace(PEAK, rate=100_000.0), MEASURED)
    assert found.redis <= PEAK.busy
    fewer = sized(replace(PEAK, rate=100_000.0), MEASURED, found.placement.primaries - 1)
    assert fewer.redis > PEAK.busy or fewer.memory > PEAK.memory
    waiting = 20_000_000.0
    large = size(replace(PEAK, rate=10.0, waiting=waiting, body=10_000), MEASURED)
    assert large.redis < 0.05
    assert large.placement.primaries > 1, "for memory alone"
    assert large.memory > waiting * (10_000 + MEASURED.waiting) * large.placement.share
    with pytest.raises(ConfigError, match="64 shards"):
        size(replace(PEAK, rate=10_000_000.0), MEASURED)
    one, three = (sized(replace(PEAK, groups=groups), MEASURED, 1) for groups in (1, 3))
    assert (three.outbound, three.inbound) == (3 * one.outbound, one.inbound)
    more_us = redis_us(three.load, MEASURED) - redis_us(one.load, MEASURED)
    assert more_us > 2 * MEASURED.life_message


def test_a_placement_counts_the_shards_of_each_primary() -> None:
    assert [one.primaries for one in placements(ORDERS)][:3] == [1, 3, 4], "two are no cluster"
    for primaries in (3, 12, 48):
        found = best_placement(ORDERS, primaries)
        slots = [key_slot(f"orders~{n}of{found.shards}".encode()) for n in range(found.shards)]
        owners = [slot * primaries // SLOTS for slot in slots]
        assert max(map(owners.count, owners)) == found.most
        assert 1 / primaries <= found.share <= 3 / primaries


def report(tmp_path: Path, without: str = "") -> Path:
    """A benchmark's report with the figures that the costs come from."""
    figures = [
        *(("bulk_send", "redis", 3.0), ("single_send", "redis", 50.0), ("drain", "redis", 18.0)),
        *(("drain", "manager", 1.0), ("drain", "consumer", 12.0), ("drain", "tombstone", 180.0)),
        ("light_load", "redis at 1,000/s", 215.0),
        ("light_load", "manager at 1,000/s", 101.0),
        ("light_load", "consumer at 1,000/s", 212.0),
        *(("bodies", "redis per kB", 1.5), ("memory", "embedded server", 296.0)),
    ]
    listed = [
        {"measure": measure, "subject": subject, "name": name, "values": [value, value * factor]}
        for measure, name, value in figures
        for subject, factor in (("lisa", 1.0), ("floor", 0.5))
        if name != without
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"mode": "full", "figures": listed}), encoding="utf-8")
    return path


def test_costs_are_read_from_a_report(tmp_path: Path) -> None:
    managed = {"manager_call": 100.0, "manager_message": 1.0}
    managed |= {"consumer_call": 200.0, "consumer_message": 12.0}
    stored = {"kilobyte": 1.5, "waiting": 196.0, "tombstone": 180.0}
    sent = {"send_call": 47.0, "send_message": 3.0, "life_call": 200.0, "life_message": 15.0}
    assert Costs.read(report(tmp_path)) == Costs(**sent, **managed, **stored)
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    for path, said in (
        (report(tmp_path, without="redis per kB"), r"'redis per kB' of bodies.*--only bodies"),
        (tmp_path / "none.json", "cannot read"),
        (tmp_path / "other.json", "not a report of benchmarks.bench"),
    ):
        with pytest.raises(ConfigError, match=said):
            Costs.read(path)


def test_the_command_prints_what_the_load_needs(tmp_path: Path) -> None:
    words = ("--rate", "20000", "--batch", "100", "--at-once", "10000000")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    found = size(replace(PEAK, rate=20_000.0, waiting=20_000.0 * 1_800), MEASURED)
    first = done.output.split("\n")[0].split()
    assert first[:2] == ["primaries", str(found.placement.primaries)]
    assert "10,000,000 at once" in done.output
    arguments = ["--rate", "3e3", "--body", "1.5kB", "--waiting", "1e6", "--json"]
    given = json.loads(CliRunner().invoke(main, arguments).output)
    assert given["primaries"] == given["shards"] == 1
    assert given["at_once_s"] is None
    assert 0 < given["lateness_p50_ms"] < given["lateness_p99_ms"]
    least = 1e6 * (MEASURED.waiting + 1_500)
    assert least < given["memory_bytes"] < 2 * least
    arguments += ["--costs", str(report(tmp_path))]
    measured = json.loads(CliRunner().invoke(main, arguments).output)
    assert measured["redis_share"] != given["redis_share"]


def test_what_cannot_be_sized_is_refused() -> None:
    for arguments, complaint in (
        (["--rate", "0"], "--rate"),
        (["--rate", "10", "--body", "1 apple"], "write 800, 2kB or 32GiB"),
        (["--rate", "1e9"], "spread it over several topics"),
        (["--rate", "10", "--topic", "a b\n"], "topic"),
        (["--rate", "10", "--costs", "/nowhere.json"], "cannot read"),
    ):
        done = CliRunner().invoke(main, [*arguments])
        assert done.exit_code != 0
        assert complaint in str(done.output) + str(done.exception)


@pytest.mark.full
def test_the_page_matches_the_model() -> None:
    page = (ROOT / "docs" / "why" / "scale.md").read_text(encoding="utf-8")
    assert page == generator("generate_scale").render(), "run: python docs/generate_scale.py"
