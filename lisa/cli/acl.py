"""`lisa acl`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from lisa.cli.options import Chosen, common, pass_chosen

__all__ = ["acl"]

_USER = re.compile(r"[^\s\x00]{1,128}\Z")


@click.command()
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@click.option("--user", help="One user with the rights of all roles named.")
@click.option(
    "--password-file", type=click.Path(dir_okay=False, path_type=Path),
    help="The user's password, in a file; its SHA-256 is printed.",
)  # fmt: skip
@click.option("--nopass", is_flag=True, help="The user needs no password.")
@click.option(
    "--format", "style", type=click.Choice(["setuser", "file"]), default="setuser",
    help="Commands for redis-cli (default), or lines of an ACL file.",
)  # fmt: skip
@click.option("--cluster", is_flag=True, help="Also what a client of a cluster asks for.")
@click.option(
    "--durability", is_flag=True, help="Also what a producer or gateway needs to wait for replicas."
)
@common
@pass_chosen
def acl(
    chosen: Chosen, roles: tuple[str, ...], user: str | None, password_file: Path | None,
    style: str, *, nopass: bool, cluster: bool, durability: bool,
) -> None:  # fmt: skip
    """Print the least rights on the server that each ROLE needs.

    Roles: producer, manager, consumer, gateway, operator (this command line), pipeline, reader
    (looks only); all where none is named. The users are called PREFIX-ROLE. Without a password
    the lines set rights alone: a user keeps its passwords, a new one is switched off.

    With --redis that server is asked which newer commands it has; else the lines fit every
    server from Redis 6.2 on.
    """
    from lisa.admin import acl as rights
    from lisa.cli.output import print_json
    from lisa.core.keys import Keys

    if nopass and password_file is not None:
        raise click.UsageError("--nopass and --password-file exclude each other")
    names = rights.check_roles(roles)
    users = {user: names} if user else {f"{chosen.server()[1]}-{one}": [one] for one in names}
    for name in users:
        if not _USER.match(name):
            raise click.UsageError(f"{name!r} is no name of a user: it holds no blanks")
    password = "" if nopass else _password(password_file)
    if password and len(users) > 1:
        raise click.UsageError("one password is for one user: name one ROLE, or a --user")
    keys = Keys(chosen.server()[1])
    newer = _newer(chosen)
    found = []
    for name, some in users.items():
        commands = rights.rights_of(some, newer=newer, cluster=cluster, durability=durability)
        text = rights.line(name, some, commands, keys, password=password, style=style)
        found.append({"user": name, "roles": some, "commands": commands, "line": text})
    if chosen.json:
        print_json({"prefix": keys.prefix, "users": found})
        return
    for one in found:
        click.echo(one["line"])


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    from lisa.core.errors import ConfigError

    try:
        found = path.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{path} is empty: write the password into it, or use --nopass")
    return found


def _newer(chosen: Chosen) -> frozenset[str]:
    if chosen.redis is None:
        return frozenset()
    from lisa.admin.acl import NEWER

    store = chosen.store(checked=False)
    return frozenset(one for one in NEWER if store.ask("COMMAND", "INFO", one)[0])
