"""`lisa demo`: runs a server, a manager, a consumer and a producer as processes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from lisa.cli.demo.ledger import DemoLedgerReader
from lisa.cli.demo.tally import DemoTally
from lisa.embedded import EmbeddedServer, RoleProcess

GRACE_SECONDS = 30.0


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
        from lisa.cli.demo.screen import show_result

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
        "consumer": role("consumer", "lisa.cli.consumer", *quiet, "lisa.cli.demo.handlers"),
        "producer": role("producer", "lisa.cli.demo.sender", str(messages), str(seconds)),
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
