"""`lisa init`: writes the files with which the roles run in production."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import click

from lisa.cli.options import Chosen, common, has_database_password
from lisa.cli.output import fail, print_json

FILES = {
    "manager.yml": "manager.full.yml",
    "consumer.yml": "consumer.full.yml",
    "producer.yml": "producer.full.yml",
    "gateway.yml": "gateway.full.yml",
    "tokens.yml": "tokens.yml",
    "shop.py": "container/shop.py",
    "systemd/lisa-manager.service": "systemd/lisa-manager.service",
    "systemd/lisa-consumer.service": "systemd/lisa-consumer.service",
    "systemd/lisa-gateway.service": "systemd/lisa-gateway.service",
}
"""The files that are written, and their sources in `configs/`."""

RELAY_FILES = {
    "relay.yml": "relay.full.yml",
    "systemd/lisa-relay.service": "systemd/lisa-relay.service",
}
"""The files that --database adds."""

NEXT = """
Next, with a Redis or Valkey server at {server}:

{enter}  lisa-manager --config manager.yml

In a second terminal, in the same folder:

  lisa-consumer --config consumer.yml shop

In a third one, to check the server, send a message and watch it arrive:

  lisa doctor --config manager.yml
  lisa send orders '{{"order": 42}}' --delay 2s --config producer.yml
  lisa top --config producer.yml

{relay}As services, with systemd:

  sudo cp systemd/lisa-*.service /etc/systemd/system/
  sudo systemctl daemon-reload
  sudo systemctl enable --now lisa-manager lisa-consumer{service}

Your handlers replace shop.py. Examples for containers, Kubernetes, Prometheus
and Grafana are in {examples}
"""
RELAY = """In a fourth one, the relay, once the outbox has its table:

  lisa outbox sql --help
  lisa-relay --config relay.yml

"""
WIDTH = 79


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option(
    "--database", metavar="URL", help="Write files for a relay, which forwards this outbox, too."
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@common
def init(chosen: Chosen, folder: Path, *, database: str | None, force: bool) -> None:
    """Write commented YAML files, a handler module and systemd units to DIR, by default here.

    --redis and --prefix are written to the YAML files. Exit code 1 if one of the files exists
    already; nothing is written then.
    """
    changes = _yaml_changes(chosen)
    files = FILES if database is None else FILES | RELAY_FILES
    relay_changes = changes | _database_changes(database)
    existing = [name for name in files if (folder / name).exists()]
    if existing and not force:
        others = f" and {len(existing) - 1} more exist" if existing[1:] else " exists"
        fail(f"{folder / existing[0]}{others}; --force overwrites")
    source = examples()
    for name, origin in files.items():
        own = _unit_changes(folder.absolute()) if name.endswith(".service") else changes
        own = relay_changes if name == "relay.yml" else own
        text = (source / origin).read_text("utf-8")
        for before, after in own.items():
            text = text.replace(before, after)
        if name == "manager.yml":
            text = _commented(text, "schedules")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    if chosen.json:
        print_json({"directory": str(folder), "files": list(files)})
        return
    written = f"Written to {folder}: {', '.join(files)}"
    click.echo(textwrap.fill(written, WIDTH, break_on_hyphens=False, break_long_words=False))
    enter = "" if folder == Path() else f"  cd {shlex.quote(str(folder))}\n"
    server = chosen.redis or "localhost:6379"
    relay, service = ("", "") if database is None else (RELAY, " lisa-relay")
    text = NEXT.format(enter=enter, server=server, examples=source, relay=relay, service=service)
    click.echo(text, nl=False)


def examples() -> Path:
    """The folder `configs/`: of the checkout, or in the installed package."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "configs", package / "configs"):
        if (folder / FILES["manager.yml"]).is_file():
            return folder
    raise FileNotFoundError(f"no configs beside {package}: the installation is incomplete")


def _yaml_changes(chosen: Chosen) -> dict[str, str]:
    """What to replace in the YAML files. Raises ConfigError or UsageError."""
    from lisa.core.model.addresses import ServerUrl
    from lisa.core.model.keys import Keys
    from lisa.core.redis.address import DEFAULT_URL, Address

    changes = {}
    if chosen.redis:
        address = Address(chosen.redis)
        if address.parts.has_password:
            raise click.UsageError(
                "these files hold no password: omit it from --redis and set LISA_REDIS__PASSWORD "
                "(for systemd: in lisa.env)"
            )
        changes[f" url: {DEFAULT_URL}\n"] = f" url: {ServerUrl.parse(chosen.redis)}\n"
    if chosen.prefix:
        changes["  prefix: lisa\n"] = f"  prefix: {Keys(chosen.prefix).prefix}\n"
    return changes


def _database_changes(database: str | None) -> dict[str, str]:
    """What to replace in the YAML file of a relay. Raises UsageError."""
    if database is None:
        return {}
    if has_database_password(database):
        raise click.UsageError(
            "these files hold no password: omit it from --database and set LISA_RELAY__DATABASE to "
            "the whole URL (for systemd: in lisa.env)"
        )
    if "://" not in database or not database.isprintable():
        raise click.UsageError("--database is a URL such as postgresql://shop@localhost/shop")
    quoted = database.replace("'", "''")
    return {"# database: postgresql://shop@localhost/shop": f"database: '{quoted}'"}


def _commented(text: str, key: str) -> str:
    """Comment out the block of a key at the second level: an example that would take effect."""
    block = rf"(?m)^  {key}:\n(?:    .*\n)*"
    return re.sub(block, lambda found: re.sub(r"(?m)^  ", "  # ", found[0]), text)


def _unit_changes(folder: Path) -> dict[str, str]:
    """What to replace in the systemd units, in which % introduces a specifier."""
    programs = Path(sys.executable).parent
    if not (programs / "lisa-manager").exists():
        programs = Path(shutil.which("lisa-manager") or "/usr/local/bin/lisa-manager").parent
    changes = {"/etc/lisa": str(folder).replace("%", "%%")}
    for name in ("lisa-manager", "lisa-consumer", "lisa-gateway", "lisa-relay"):
        changes[f"=/usr/local/bin/{name}"] = f"={_unit_word(programs / name)}"
    if os.getuid() != 0:  # the folder may be private to this user
        changes["# A user without rights; the files above must be readable by all users.\n"] = ""
        changes["DynamicUser=yes"] = f"User={_user()}"
    return changes


def _unit_word(path: Path) -> str:
    """The path of a program in a systemd unit, which may contain spaces, but no quotes."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def _user() -> str:
    """The name of this process's user, or its number if it has no name, as in containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
