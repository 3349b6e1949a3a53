"""The table of permissions compared with the sources, and the output of `lisa acl`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from click.testing import CliRunner

from lisa.admin import acl
from lisa.admin.probes import probe
from lisa.cli.main import main
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions import loader

ROOT = Path(__file__).parent.parent.parent


def lisa(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"LISA_REDIS_URL": "", "LISA_PREFIX": ""}).invoke(
        main, ["acl", *arguments]
    )
    assert result.exit_code == code, result.output
    return result.output


def test_scripts_call_commands_by_name_only() -> None:
    """Commands found in scripts are all commands that they call."""
    for path in sorted((ROOT / "lua").rglob("*.lua")):
        code = re.sub(r"--[^\n]*", "", path.read_text("utf-8"))
        assert len(re.findall(r"\bp?call\(", code)) == len(acl._CALL.findall(code)), path.name
    assert acl.called_by("declare") >= {"xgroup|create", "hset", "publish"}
    assert "xgroup|create" not in acl.called_by("ack")
    used = {script for role in acl.ROLES.values() for script in role.scripts}
    assert used == set(loader.names()), "each belongs to a role"


def test_every_permission_is_probed_except_those_that_change_the_connection() -> None:
    store = SyncStore(Connection(Address()), Keys())
    rights = acl.rights_of(acl.ROLES)
    unprobed = [right for right in rights if probe(store, right) is None]
    assert unprobed == ["exec", "multi", "select", "subscribe"]


DANGEROUS = (
    *("flushall", "flushdb", "keys", "config|set", "script|flush", "script|kill", "shutdown"),
    *("acl|setuser", "debug", "eval", "client|kill", "replicaof", "save", "monitor", "migrate"),
)


def test_no_role_gets_dangerous_permissions() -> None:
    rights = acl.rights_of(acl.ROLES, newer=acl.NEWER, cluster=True)
    assert set(rights).isdisjoint(DANGEROUS)


def test_lines_for_all_roles() -> None:
    lines = lisa().splitlines()
    assert [line.split()[2] for line in lines] == [f"lisa-{role}" for role in acl.ROLES]
    for line in lines:
        assert line.startswith("ACL SETUSER lisa-")
        assert " resetkeys ~lisa:* resetchannels " in line
        assert {"nopass", "on", "+msetex"}.isdisjoint(line.split())
    told = json.loads(lisa("reader", "producer", "--json"))
    assert told["prefix"] == "lisa"
    users = [(user["user"], user["roles"]) for user in told["users"]]
    assert users == [("lisa-reader", ["reader"]), ("lisa-producer", ["producer"])]
    assert told["users"][0]["commands"] == acl.rights_of(["reader"])


def test_one_user_with_a_password_or_for_two_roles(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    line = lisa("manager", "--password-file", str(file), "--prefix", "shop").strip()
    digest = hashlib.sha256(b"s3cret").hexdigest()
    assert line.startswith(
        f"ACL SETUSER shop-manager on resetpass #{digest} resetkeys ~shop:* resetchannels "
        "&shop:wake -@all +"
    )
    assert "s3cret" not in line
    line = lisa("producer", "consumer", "--user", "shop", "--nopass", "--format", "file").strip()
    assert line.startswith("user shop on resetpass nopass resetkeys ")
    granted = {word[1:] for word in line.split() if word.startswith("+")}
    assert granted == {*acl.rights_of(["producer"]), *acl.rights_of(["consumer"])}


def test_waiting_for_replicas_needs_a_permission() -> None:
    for role in acl.ROLES:
        waits = role in ("producer", "gateway", "operator")
        assert "+wait" not in lisa(role).split()
        assert ("+wait" in lisa(role, "--durability").split()) == waits
        assert "waitaof" not in lisa(role, "--durability")  # not known whether the server has it
        newest = acl.rights_of([role], newer=["waitaof"], durability=True)
        assert ("waitaof" in newest) == waits


def test_invalid_values_are_refused() -> None:
    for said, arguments in {
        "unknown role 'boss': use producer, manager": ["boss"],
        "exclude each other": ["--nopass", "--password-file", "x"],
        "cannot read absent": ["manager", "--password-file", "absent"],
        "is not a valid user name": ["manager", "--user", "a b"],
        "a password needs a single user": ["--password-file", __file__],
    }.items():
        assert said in lisa(*arguments, code=2)
