"""`lisa acl`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from lisa.cli.options import Chosen, common, read_text_file
from lisa.cli.output import print_json

_USER = re.compile(r"[^\s\x00]{1,128}\Z")


@click.command()
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@click.option("--user", help="Name of a single user that gets the rights of all given roles.")
@click.option(
    "--password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the user's password; the output contains its SHA-256.",
)
@click.option("--nopass", is_flag=True, help="The user needs no password.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["setuser", "file"]),
    default="setuser",
    help="Print commands for redis-cli (default) or lines of an ACL file.",
)
@click.option("--cluster", is_flag=True, help="Include the commands that a cluster client needs.")
@click.option(
    "--durability",
    is_flag=True,
    help="Include the commands that a producer, gateway or operator needs to wait for replicas.",
)
@common
def acl(
    chosen: Chosen,
    roles: tuple[str, ...],
    user: str | None,
    password_file: Path | None,
    style: str,
    *,
    nopass: bool,
    cluster: bool,
    durability: bool,
) -> None:
    """Print the minimal ACL rights that each ROLE needs on the server.

    Roles: producer, manager, consumer, gateway, operator (this command line), pipeline and reader
    (read-only). Default: all roles. Users are named PREFIX-ROLE. Without a password option, the
    output sets rights only: an existing user keeps its passwords, a new user is disabled.

    With --redis, the output includes the newer commands that the server supports. Otherwise it
    works on every server since Redis 6.2.
    """
    from lisa.admin import acl as rights
    from lisa.core.model.keys import Keys

    if nopass and password_file is not None:
        raise click.UsageError("--nopass and --password-file exclude each other")
    names = rights.check_roles(roles)
    keys = Keys(chosen.server()[1])
    users = {user: names} if user else {f"{keys.prefix}-{one}": [one] for one in names}
    for name in users:
        if not _USER.match(name):
            raise click.UsageError(f"{name!r} is not a valid user name: it must not contain spaces")
    password = "" if nopass else _password(password_file)
    if password and len(users) > 1:
        raise click.UsageError("a password needs a single user: give one ROLE, or --user")
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
    from lisa.core.model.errors import ConfigError

    found = read_text_file(path).rstrip("\r\n")
    if not found:
        raise ConfigError(f"{path} is empty: write the password to it, or use --nopass")
    return found


def _newer(chosen: Chosen) -> frozenset[str]:
    if chosen.redis is None:
        return frozenset()
    from lisa.admin.acl import NEWER

    store = chosen.store(checked=False)
    return frozenset(one for one in NEWER if store.ask("COMMAND", "INFO", one)[0])
