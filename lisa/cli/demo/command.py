"""`lisa demo`: a server, a manager, a consumer and a producer as real processes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from lisa.cli.demo.ledger import Reader
from lisa.cli.demo.tally import Tally
from lisa.embedded import EmbeddedServer, RoleProcess

__all__ = ["demo"]

SPARE_SECONDS = 30.0


@click.command()
@click.option("--messages", default=10_000, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Their due times are spread over so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def demo(messages: int, seconds: float, as_json: bool) -> None:  # noqa: FBT001 - click's flag
    """Orders time out: everything embedded, all counted from what the handlers saw.

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


def run(messages: int, seconds: float, *, quiet: bool) -> Tally:
    """Start everything, follow the ledgers until all is settled, end everything."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        # In the server's own directory: that goes with the server, also after a kill -9.
        folder = Path(stack.enter_context(TemporaryDirectory(dir=server.directory)))
        roles = start_roles(stack, server.url, folder, messages, seconds)
        readers = [Reader(folder / "consumer.ledger"), Reader(folder / "producer.ledger")]
        return follow(readers, roles, messages, seconds, quiet=quiet)


def start_roles(
    stack: ExitStack, url: str, folder: Path, messages: int, seconds: float
) -> dict[str, RoleProcess]:
    """Manager, consumer and producer, each with a log of its own."""

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
    readers: list[Reader],
    roles: dict[str, RoleProcess],
    messages: int,
    seconds: float,
    *,
    quiet: bool,
) -> Tally:
    """Count until all is settled, or until the time is up: then the rest is lost."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    tally = Tally()
    deadline = time.monotonic() + seconds + SPARE_SECONDS
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
    """Tell at once if a role died, in its own last words."""
    for name, process in roles.items():
        if process.poll():
            words = process.last_words()
            raise click.ClickException(f"the demo's {name} ended with {process.poll()}: {words}")
