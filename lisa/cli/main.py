"""`lisa`: imports each command on use, so that `--help` stays fast."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import click

from lisa.cli.options import common_options
from lisa.core.daemon.processes import exit_code
from lisa.core.model.errors import LisaError, TooManyGroups
from lisa.core.model.extras import requires

Sections: TypeAlias = Mapping[str, Mapping[str, tuple[str, str]]]
"""The commands by section: the module that defines each, and its line of help."""

SECTIONS: Sections = {
    "Try it": {
        "demo": ("lisa.cli.demo", "Run a demo of order time-outs on an embedded server."),
        "up": ("lisa.cli.up", "Run an embedded server and a manager, for development."),
        "init": ("lisa.cli.init", "Write configuration files and systemd units, for production."),
    },
    "Messages": {
        "send": ("lisa.cli.send", "Send a message, or each line of a file."),
        "get": ("lisa.cli.messages", "Show the state of a message."),
        "why": ("lisa.cli.messages", "Say why a message is not running now."),
        "list": ("lisa.cli.messages", "List messages in one state."),
        "cancel": ("lisa.cli.messages", "Cancel messages."),
        "reschedule": ("lisa.cli.messages", "Change the due time of a message."),
        "fire": ("lisa.cli.messages", "Make a message due now."),
        "key": ("lisa.cli.keyed", "List, cancel, reschedule or limit the messages of a key."),
        "next": ("lisa.cli.send", "Show when a message would be due, and why."),
        "schedules": ("lisa.cli.schedules", "List, define or run recurring messages."),
        "garbage": ("lisa.cli.garbage", "List, requeue or purge dead messages."),
    },
    "The system": {
        "topics": ("lisa.cli.topics", "Show the message counts of all topics."),
        "topic": ("lisa.cli.topics", "Show or change one topic: options, pause, groups."),
        "consumers": ("lisa.cli.system", "List the consumers."),
        "managers": ("lisa.cli.system", "List the managers."),
        "relays": ("lisa.cli.system", "List the relays of outboxes."),
        "loaders": ("lisa.cli.system", "List the jobs that load tables, and forget one."),
        "top": ("lisa.cli.top", "Watch all topics live."),
        "fsck": ("lisa.cli.system", "Check messages and keys for inconsistencies."),
        "acl": ("lisa.cli.system", "Print the ACL rights that each role needs."),
        "doctor": ("lisa.cli.system", "Check the server's configuration and suggest fixes."),
        "outbox": (
            "lisa.cli.outbox",
            "Print the tables as SQL; list, retry or discard rows set aside.",
        ),
        "pipeline": ("lisa.cli.pipeline", "Schedule, archive, report, search, restore with Spark."),
    },
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use.

    Exit codes: 0 success; 1 negative answer; 2 usage or configuration error; 3 server unavailable.
    An error is one line on stderr.
    """

    def __init__(self, *args: Any, sections: Sections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sections = sections
        self._modules = {
            name: module for section in sections.values() for name, (module, _) in section.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All command names, in the order of the help page."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in self._modules:
            return None
        with requires("standard"):
            module = import_module(self._modules[cmd_name])
        # Commands named like a Python type or keyword end with an underscore in their module.
        command: click.Command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        for section, commands in self._sections.items():
            with formatter.section(section):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; end it with code 0 if the reader of its output closes the pipe."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Python's final flush must not fail, too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - click's signature
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code."""
        run = super().main
        if not standalone_mode:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)
        _prepare_streams()
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
        except OSError as error:  # names no file if it is stdout, as on a full disk
            file = "" if error.filename is None else f"{error.filename}: "
            _fail(1, f"lisa: {file}{error.strerror or error}")
        except LisaError as error:
            # A topic that is full of groups is an answer, not a wrong configuration.
            _fail(1 if isinstance(error, TooManyGroups) else exit_code(error), f"lisa: {error}")
        except UnicodeEncodeError as error:  # an argument that is not text
            _fail(2, f"lisa: {error.object[:80]!r} is not UTF-8 text")
        sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Replace closed streams, and escape characters that the encoding of stdout lacks."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115  used until the program ends
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _path(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx is not None else "lisa"


def _fail(code: int, line: str) -> None:
    click.echo(" ".join(line.split()), err=True)
    sys.exit(code)


@click.command(
    "lisa",
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lisa-delay-queue", prog_name="lisa")
@common_options
def main() -> None:
    """Delayed messages on Redis Streams: never early, within milliseconds, never lost.

    The server is --redis, else LISA_REDIS_URL, else the server in the file LISA_CONFIG, else
    redis://localhost:6379/0. Options may come before or after the command.

    Exit codes: 0 success; 1 negative answer (unknown id, not cancelled, failed check); 2 usage or
    configuration error; 3 server unavailable.
    """


if __name__ == "__main__":
    main()
