"""`lisa`: every command is imported when it is called, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from lisa.cli.options import Chosen, common
from lisa.core.errors import ConfigError, InvalidMessage, LisaError, ServerUnavailable

__all__ = ["main"]

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Try it": {
        "demo": ("lisa.cli.demo.command", "Orders time out, everything embedded."),
        "up": ("lisa.cli.up", "Run an embedded server and a manager, for development."),
    },
    "Messages": {
        "send": ("lisa.cli.send", "Send a message, or each line of a file."),
        "get": ("lisa.cli.messages", "Show where a message stands."),
        "list": ("lisa.cli.messages", "List messages in one state."),
        "cancel": ("lisa.cli.messages", "Take messages back for good."),
        "reschedule": ("lisa.cli.messages", "Give a message a new due time."),
        "fire": ("lisa.cli.messages", "Make a message due now."),
        "garbage": ("lisa.cli.garbage", "Look through dead messages, requeue or purge them."),
    },
    "The system": {
        "topics": ("lisa.cli.topics", "Show how many messages stand where."),
        "topic": ("lisa.cli.topics", "Show or change one topic: options, pause, groups."),
        "consumers": ("lisa.cli.roles", "Show which consumers there are."),
        "managers": ("lisa.cli.roles", "Show which managers there are."),
        "top": ("lisa.cli.top", "Watch all topics live."),
        "fsck": ("lisa.cli.fsck", "Prove that every message stands where it should."),
        "acl": ("lisa.cli.acl", "Print the rights that each role needs on the server."),
        "doctor": ("lisa.cli.doctor", "Check the server, and say what to change."),
        "pipeline": ("lisa.cli.pipeline", "Schedule, archive, report, search, restore with Spark."),
        "bench": ("lisa.cli.bench.command", "Measure how fast and how punctual it is here."),
    },
}
"""Per section the commands, each with its module (which names it as it is called) and one line."""

COMMANDS = {name: found for section in SECTIONS.values() for name, found in section.items()}


class Lazy(click.Group):
    """A group whose commands live in modules that are imported on use.

    Exit codes: 0; 1 a negative answer; 2 usage or configuration; 3 no server. An error is one
    line on stderr.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(COMMANDS[cmd_name][0])
        # A command named like a type or a keyword of Python's ends with an underscore there.
        command: click.Command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, from their lines above: nothing is imported."""
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: Any,
    ) -> Any:
        """Run, and end the process with the exit code that belongs to what happened."""
        run = super().main
        if not standalone_mode:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = run(args, prog_name or "lisa", complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        except click.UsageError as error:
            _fail(2, f"{_path(error)}: {error.format_message()} (see {_path(error)} --help)")
        except click.ClickException as error:
            _fail(2, f"lisa: {error.format_message()}")
        except click.Abort:
            _fail(1, "lisa: aborted")
        except BrokenPipeError:
            # Whoever read has left; Python's own flush at the end must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:  # a full disk behind stdout
            _fail(1, f"lisa: {error.strerror or error}")
        except LisaError as error:
            _fail(_code(error), f"lisa: {error}")
        sys.exit(code if isinstance(code, int) else 0)


def _path(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx is not None else "lisa"


def _code(error: LisaError) -> int:
    if isinstance(error, ServerUnavailable):
        return 3
    return 2 if isinstance(error, (ConfigError, InvalidMessage)) else 1


def _fail(code: int, line: str) -> None:
    click.echo(" ".join(line.split()), err=True)
    sys.exit(code)


@click.command("lisa", cls=Lazy)
@click.version_option(package_name="lisa-delay-queue", prog_name="lisa")
@common
@click.pass_context
def main(ctx: click.Context) -> None:
    """Delayed messages on Redis Streams: never early, within milliseconds, never lost.

    The server is --redis, else LISA_REDIS_URL, else what the file at LISA_CONFIG names, else
    redis://localhost:6379/0. Options may stand before or behind the command.

    Exit codes: 0; 1 a negative answer (an unknown id, not cancelled, a failing check); 2 usage or
    configuration; 3 no server.
    """
    ctx.ensure_object(Chosen)


if __name__ == "__main__":
    main()
