"""`lisa demo`: ten thousand order time-outs on an embedded server, with each role in a process.

The consumer and the producer record their events in ledgers: files with one line per event. Each
line is one write, so that a killed process loses no event. The report counts only these lines.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click

from lisa.embedded import EmbeddedServer, RoleProcess

GRACE_SECONDS = 30.0

BOUNDS_MS = (0.5, 1, 2, 3, 5, 10, 20, 50, 100, 1_000)
BAR = 40
LABELS = {
    "sent": "sent",
    "handled": "handled",
    "cancelled": "cancelled in time",
    "rescheduled": "rescheduled",
    "retried": "retries",
    "garbage": "garbage",
    "lateness_p50_ms": "lateness p50",
    "lateness_p99_ms": "lateness p99",
    "lateness_max_ms": "lateness max",
    "early": "early",
    "lost": "lost",
    "handled_twice": "handled twice",
    "handled_after_cancel": "handled after cancel",
}
MUST_BE_ZERO = ("early", "lost", "handled_after_cancel")


@click.command()
@click.option("--messages", default=10_000, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Period over which the due times are spread.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def demo(messages: int, seconds: float, as_json: bool) -> None:  # noqa: FBT001 - click's flag
    """Run order time-outs on an embedded server and count what the handlers recorded.

    Exit code 1 if a message was early, lost, or handled after it was cancelled.
    """
    tally = run(messages, seconds, quiet=as_json)
    figures = tally.figures()
    if as_json:
        click.echo(json.dumps(figures))
    else:
        show_result(figures, tally.lateness_us)
    if figures["early"] or figures["lost"] or figures["handled_after_cancel"]:
        raise SystemExit(1)


def run(messages: int, seconds: float, *, quiet: bool) -> DemoTally:
    """Start all processes, read the ledgers until every message is settled, stop all processes."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        # The server's directory is removed with the server, even after kill -9.
        folder = Path(stack.enter_context(TemporaryDirectory(dir=server.directory)))
        roles = start_roles(stack, server.url, folder, messages, seconds)
        readers = [
            DemoLedgerReader(folder / "consumer.ledger"),
            DemoLedgerReader(folder / "producer.ledger"),
        ]
        return follow(readers, roles, messages, seconds, quiet=quiet)


def start_roles(
    stack: ExitStack, url: str, folder: Path, messages: int, seconds: float
) -> dict[str, RoleProcess]:
    """Start the manager, consumer and producer, each with its own log file."""

    def role(name: str, module: str, *arguments: str) -> RoleProcess:
        env = {"LISA_REDIS_URL": url, "LISA_DEMO_LEDGER": str(folder / f"{name}.ledger")}
        process = RoleProcess(module, *arguments, env=env, log=folder / f"{name}.log")
        return stack.enter_context(process)

    quiet = ("--log-level", "warning")
    return {
        "manager": role("manager", "lisa.cli.manager", *quiet),
        "consumer": role("consumer", "lisa.cli.consumer", *quiet, "lisa.cli.demo_handlers"),
        "producer": role("producer", "lisa.cli.demo_sender", str(messages), str(seconds)),
    }


def follow(
    readers: list[DemoLedgerReader],
    roles: dict[str, RoleProcess],
    messages: int,
    seconds: float,
    *,
    quiet: bool,
) -> DemoTally:
    """Count events until every message is settled or the time is up; the rest counts as lost."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    tally = DemoTally()
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    tail = TextColumn("p50 {task.fields[p50]:.1f} ms  p99 {task.fields[p99]:.1f} ms late")
    with Progress(*columns, tail, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("orders settled", total=messages, p50=0.0, p99=0.0)
        while not tally.finished and time.monotonic() < deadline:
            time.sleep(0.25)
            for reader in readers:
                tally.add(reader.new_events())
            p50, p99 = tally.percentile_ms(0.5), tally.percentile_ms(0.99)
            progress.update(task, completed=tally.settled, p50=p50, p99=p99)
            check_alive(roles)
    return tally


def check_alive(roles: dict[str, RoleProcess]) -> None:
    """Raise ClickException with the last log line of a role that has exited with an error."""
    for name, process in roles.items():
        if process.poll():
            words = process.log_tail()
            raise click.ClickException(f"the demo's {name} ended with {process.poll()}: {words}")


class DemoEvent(NamedTuple):
    """One line. `number` is a due time, lateness or attempt, depending on `kind`."""

    kind: str
    id: str
    number: int


class DemoLedger:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *events: DemoEvent) -> None:
        """Append events."""
        lines = "".join(f"{event.kind} {event.id} {event.number}\n" for event in events)
        os.write(self._file, lines.encode())


class DemoLedgerReader:
    """Follows a file to which another process appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> list[DemoEvent]:
        """Events written since the last call; incomplete lines are left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = (line.split() for line in whole.decode().splitlines())
        return [DemoEvent(kind, message_id, int(number)) for kind, message_id, number in rows]


@dataclass
class DemoTally:
    """Message ids by outcome, and the lateness of first deliveries in microseconds."""

    sent: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    rescheduled: set[str] = field(default_factory=set)
    handled: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    retries: int = 0
    lateness_us: list[int] = field(default_factory=list)
    all_sent: bool = False

    def add(self, events: Iterable[DemoEvent]) -> None:
        """Count events of any ledger."""
        for kind, message_id, number in events:
            if kind == "opened":
                self.lateness_us.append(number)
            elif kind == "handled":
                self.handled[message_id] += 1
            elif kind == "retrying":
                self.retries += 1
            elif kind == "end":
                self.all_sent = True
            elif kind in ("sent", "cancelled", "rescheduled", "dead"):
                getattr(self, kind).add(message_id)

    @property
    def settled(self) -> int:
        """Number of messages that were handled, cancelled or died."""
        return len(self.sent & (self.handled.keys() | self.dead | self.cancelled))

    @property
    def finished(self) -> bool:
        """Whether all messages are sent and settled."""
        return self.all_sent and self.settled == len(self.sent)

    def percentile_ms(self, fraction: float) -> float:
        """A percentile of the lateness in milliseconds; 0 if nothing was handled."""
        ordered = sorted(self.lateness_us)
        if not ordered:
            return 0.0
        return max(0, ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]) / 1000

    def figures(self) -> dict[str, int | float]:
        """The results by name; lateness in milliseconds."""
        return {
            "sent": len(self.sent),
            "handled": len(self.handled),
            "cancelled": len(self.cancelled),
            "rescheduled": len(self.rescheduled),
            "retried": self.retries,
            "garbage": len(self.dead),
            "lateness_p50_ms": self.percentile_ms(0.5),
            "lateness_p99_ms": self.percentile_ms(0.99),
            "lateness_max_ms": self.percentile_ms(1.0),
            "early": sum(late < 0 for late in self.lateness_us),
            "lost": len(self.sent) - self.settled,
            "handled_twice": sum(times > 1 for times in self.handled.values()),
            "handled_after_cancel": len(self.cancelled & self.handled.keys()),
        }


def show_result(figures: dict[str, int | float], lateness_us: list[int]) -> None:
    """Print the results and the histogram of `lateness_us`, in microseconds."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Recorded by the handlers", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, label in LABELS.items():
        value = figures[name]
        shown = f"{value:,.2f} ms" if name.endswith("_ms") else f"{value:,}"
        style = "" if name not in MUST_BE_ZERO else "green" if value == 0 else "bold red"
        table.add_row(label, Text(shown, style=style))
    counts = [0] * (len(BOUNDS_MS) + 1)
    for late in lateness_us:
        counts[bisect_left(BOUNDS_MS, late / 1000)] += 1
    most = max(counts) or 1
    last = max((i for i, count in enumerate(counts) if count), default=0)
    chart = Table.grid(padding=(0, 1))
    chart.add_column(justify="right")
    chart.add_column()
    chart.add_column(justify="right")
    for i, count in enumerate(counts[: last + 1]):
        label = f"<= {BOUNDS_MS[i]:g} ms" if i < len(BOUNDS_MS) else f"> {BOUNDS_MS[-1]:g} ms"
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        chart.add_row(label, Text(bar, style="cyan"), f"{count:,}")
    Console().print(table, "", "Lateness of first deliveries", chart, sep="\n")
