"""`lisa size`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Duration, common

if TYPE_CHECKING:
    from lisa.cli.size.model import PeakLoad, Size
    from lisa.cli.size.simulation import Simulated

    _BytesType = click.ParamType[int]
else:  # not generic before click 8.4
    _BytesType = click.ParamType


class Bytes(_BytesType):
    """A number of bytes with an optional unit: 800, 2kB, 1.5MB, 32GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the value, or fail with a usage error."""
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            return TypeAdapter(ByteSize).validate_python(value)
        except ValidationError:
            self.fail(f"{value!r} is not a size; write 800, 2kB or 32GiB", param, ctx)


@click.command()
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    required=True,
    metavar="N",
    help="Messages per second at the peak, sent and due.",
)
@click.option("--body", type=Bytes(), default="1kB", show_default=True, help="Mean size of a body.")
@click.option(
    "--delay",
    type=Duration(),
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="How long a message waits on average.",
)
@click.option(
    "--waiting",
    type=click.FloatRange(0),
    metavar="N",
    help="Messages that wait, instead of --delay.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Messages in a send call.",
)
@click.option(
    "--groups",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Consumer groups that each receive every message.",
)
@click.option("--at-once", type=click.IntRange(1), metavar="N", help="Messages due at one instant.")
@click.option(
    "--retention",
    type=Duration(),
    default="1m",
    show_default=True,
    metavar="DURATION",
    help="The topic's retention of tombstones.",
)
@click.option(
    "--round-trip",
    type=Duration(),
    default="0.5ms",
    show_default=True,
    metavar="DURATION",
    help="Network round trip, as `redis-cli --latency` measures it.",
)
@click.option(
    "--busy",
    type=click.FloatRange(0.05, 0.95),
    default=0.6,
    show_default=True,
    help="Largest share of its core that a Redis or a consumer may use.",
)
@click.option(
    "--memory", type=Bytes(), default="32GiB", show_default=True, help="Memory of a primary."
)
@click.option(
    "--topic",
    default="orders",
    show_default=True,
    metavar="NAME",
    help="The topic: its name decides on which primaries its shards lie.",
)
@click.option(
    "--costs",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The report.json that `lisa bench --out` wrote on your hardware.",
)
@common
def size(chosen: Chosen, **options: Any) -> None:
    """Estimate the Redis Cluster that a topic needs: primaries, shards, memory, processes.

    Needs no server. Derives the load of each part from the costs that `lisa bench` measures, and
    simulates the busiest primary for the lateness.
    """
    from lisa.cli.output import print_json, print_table
    from lisa.cli.size.costs import MEASURED, Costs
    from lisa.cli.size.model import size as fitting
    from lisa.cli.size.simulation import simulate

    file = options["costs"]
    costs = Costs.read(file) if file is not None else MEASURED
    peak = _demand(options)
    found = fitting(peak, costs)
    simulated = simulate(found.load, costs)
    if chosen.json:
        print_json(_document(found, simulated, options["at_once"]))
    else:
        print_table(("", " ", ""), _rows(peak, found, simulated, options["at_once"]))


def _demand(options: dict[str, Any]) -> PeakLoad:
    from lisa.cli.size.model import PeakLoad
    from lisa.core.model.keys import check_topic
    from lisa.core.model.sharding import Topic

    waiting = options["waiting"]
    return PeakLoad(
        topic=Topic(check_topic(options["topic"])),
        rate=options["rate"],
        body=options["body"],
        waiting=options["rate"] * options["delay"].total_seconds() if waiting is None else waiting,
        batch=options["batch"],
        groups=options["groups"],
        retention_s=options["retention"].total_seconds(),
        round_trip_us=options["round_trip"].total_seconds() * 1e6,
        busy=options["busy"],
        memory=options["memory"],
    )


def _rows(
    peak: PeakLoad, found: Size, simulated: Simulated, at_once: int | None
) -> list[tuple[str, str, str]]:
    from lisa.core.model.clock import human

    placement = found.placement
    rows = [
        ("primaries", f"{placement.primaries:,}", f"the busiest uses {found.redis:.0%} of a core"),
        ("shards", f"{placement.shards}", f"at most {placement.most} on a primary"),
        (
            "memory of a primary",
            f"{found.memory / 2**30:,.1f} GiB",
            f"{peak.waiting:,.0f} messages wait in all",
        ),
        (
            "network of a primary",
            f"{found.outbound * 8e-6:,.0f} Mbit/s",
            f"out; {found.inbound * 8e-6:,.0f} Mbit/s in",
        ),
        (
            "managers",
            f"{found.managers}",
            f"each uses {found.manager:.0%} of a core; one may fail",
        ),
        (
            "consumer processes",
            f"{found.consumers * peak.groups:,}",
            "at least; handlers need time of their own",
        ),
        (
            "lateness p50 / p99",
            f"{simulated.p50_ms:.1f} / {simulated.p99_ms:.1f} ms",
            "simulated, with idle handlers",
        ),
        ("drain", f"{found.drain:,.0f}/s", "messages due at one instant"),
    ]
    if at_once is not None:
        took_ms = round(at_once / found.drain * 1000)
        rows.append((f"{at_once:,} at once", human(took_ms), "until the last is handled"))
    return rows


def _document(found: Size, simulated: Simulated, at_once: int | None) -> dict[str, Any]:
    return {
        "primaries": found.placement.primaries,
        "shards": found.placement.shards,
        "shards_of_busiest": found.placement.most,
        "redis_share": found.redis,
        "managers": found.managers,
        "manager_share": found.manager,
        "consumers_per_group": found.consumers,
        "memory_bytes": round(found.memory),
        "inbound_bytes_per_s": found.inbound,
        "outbound_bytes_per_s": found.outbound,
        "drain_per_s": found.drain,
        "at_once_s": None if at_once is None else at_once / found.drain,
        "lateness_p50_ms": simulated.p50_ms,
        "lateness_p99_ms": simulated.p99_ms,
        "simulated_redis_share": simulated.busy,
    }
