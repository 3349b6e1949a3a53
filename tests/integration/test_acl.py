"""Each role as a separate user on real servers, the table of rights, and `lisa acl`."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from lisa import Producer
from lisa.admin import acl
from lisa.admin.acl import probe
from lisa.admin.doctor import examine
from lisa.cli.main import main
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.server_checks import CheckResult
from lisa.core.store.store import SyncStore
from lisa.core.transitions import loader
from lisa.core.transitions.inspect import Inspect
from tests.acl_scenes import SCENES
from tests.acl_stage import KEYS, PASSWORD, Stage
from tests.servers import Processes, connect, flush, open_store

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> str:
    """An empty server of each kind: they have different commands."""
    name = {"valkey": "valkey_server", "redis": "debian_server"}[request.param]
    return flush(request.getfixturevalue(name).url)


@pytest.fixture
def stage_for(server: str) -> Iterator[Callable[[str], Stage]]:
    """A stage for a role, on each kind of server."""
    with ExitStack() as stack:
        yield lambda role: stack.enter_context(closing(Stage(server, role)))


@pytest.mark.parametrize("role", SCENES)
def test_a_role_does_all_its_work_with_its_rights_and_uses_each(
    stage_for: Callable[[str], Stage], role: str
) -> None:
    stage = stage_for(role)
    SCENES[role](stage)
    # Without a living manager, a command asks by a write whether the server refuses writes.
    expected = {"lisa-reader command zadd"} if role == "reader" else set()
    assert set(stage.refused()) <= expected
    assert set(stage.rights) - stage.called == set()


FOREIGN_KEYS = ("other", "lisa", "lisax:{orders}:waiting", "{lisa:}orders")


def every_command(stage: Stage) -> list[str]:
    """All commands of the server, named as in rights: `get`, `xgroup|create`."""
    found: list[str] = []
    for row in stage.ask("COMMAND"):
        subcommands = [sub[0].decode().lower() for sub in row[9]]
        found += subcommands or [row[0].decode().lower()]
        if row[0] == b"command":
            found.append("command")
    return found


@pytest.mark.parametrize("role", acl.ROLES)
def test_everything_else_is_refused(stage_for: Callable[[str], Stage], role: str) -> None:
    stage = stage_for(role)
    others = set(every_command(stage)) - set(stage.rights)
    assert len(others) > 200
    always = {"auth", "hello", "quit", "reset"}  # no user can be denied these
    for name in sorted(others - always):
        words = name.upper().split("|")
        (row,) = stage.ask("COMMAND", "INFO", name)
        # The server checks the number of arguments before the right.
        padding = ["1"] * max(0, abs(row[1]) - len(words))
        said = stage.ask("ACL", "DRYRUN", stage.user, *words, *padding)
        assert b"has no permissions to run" in bytes(said), name
    with connect(stage.url) as client:
        for key in (*FOREIGN_KEYS, "lisa:eu:{orders}:waiting", "lisa:eu:topics"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.zscore(key, "m")
        assert client.zscore(KEYS.topic("orders").waiting, "m") is None
        sees = "publish" in stage.rights
        if sees:
            client.publish(KEYS.wake, "")
        for channel in ("other", "lisa:wakes", "lisa:*", *(() if sees else (KEYS.wake,))):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.publish(channel, "")


def named(right: str, *scripts: str) -> str:
    """The permission named in a refusal: before Redis 7.2, the script, not the command."""
    script = f"a permission .* the script '({'|'.join(scripts)})'"
    return rf"lacks (the permission \+{re.escape(right)}|{script})"


@pytest.mark.parametrize("right", ["zadd", "evalsha", "hmget"])
def test_the_error_names_a_right_that_a_producer_lacks(
    stage_for: Callable[[str], Stage], right: str
) -> None:
    stage = stage_for("producer")
    stage.cast().declare()
    stage.ask("SCRIPT", "FLUSH")
    stage.admin.delete(KEYS.schema)
    stage.give([one for one in stage.rights if one != right])
    said = named(right, "cancel", "enqueue") + ".*`lisa acl`"
    with Producer(stage.url) as producer, pytest.raises(ConfigError, match=said):
        producer.cancel("orders", producer.send("orders", "x"))


DAEMONS = {
    "manager": ["-m", "lisa.cli.manager"],
    "consumer": ["-m", "lisa.cli.consumer", "shop"],
    "gateway": ["-m", "lisa.cli.gateway", "--port", "0"],
}


@pytest.mark.parametrize(
    ("role", "right"),
    [
        ("manager", "subscribe"),
        pytest.param("consumer", "client|unblock", marks=pytest.mark.full),
        pytest.param("gateway", "zrank", marks=pytest.mark.full),
    ],
)
def test_a_daemon_that_lacks_a_right_ends_at_once(
    stage_for: Callable[[str], Stage], processes: Processes, tmp_path: Path, role: str, right: str
) -> None:
    (tmp_path / "shop.py").write_text(
        "from lisa import Consumer\nc = Consumer()\nc.subscribe('orders', print)\n"
    )
    stage = stage_for(role)
    stage.give([one for one in stage.rights if one != right])
    process = processes.start(*DAEMONS[role], "--redis", stage.url)
    assert process.wait() == 2
    [line] = [one for one in process.output.splitlines() if not one.startswith("warning: ")]
    assert re.search(rf"\+{re.escape(right)}\b", line)
    assert "`lisa acl" in line
    assert PASSWORD.replace(" ", "%20") not in line
    assert PASSWORD not in line


def test_the_command_line_says_which_right_it_lacks(stage_for: Callable[[str], Stage]) -> None:
    stage = stage_for("operator")
    stage.give([one for one in stage.rights if one != "zscore"])
    done = CliRunner().invoke(main, ["get", "orders", "x", "--redis", stage.url])
    assert done.exit_code == 2
    assert re.search(named("zscore", "inspect") + ".*`lisa acl` prints", done.stderr)
    assert len([one for one in done.stderr.splitlines() if not one.startswith("warning: ")]) == 1


@pytest.mark.parametrize("role", acl.ROLES)
def test_probes_change_no_key(server: str, role: str) -> None:
    """Not even on a server that lost the schema key: a probe once created it as a hash."""
    store = SyncStore(Connection(Address(server)), KEYS)
    commands = [made for right in acl.rights_of([role]) if (made := probe(store, right))]
    with connect(server) as client:
        store.drive(store.commands_once(commands))
        assert client.dbsize() == 0
        names = (KEYS.schema, KEYS.topics, KEYS.managers)
        for name in names:
            client.set(name, "kept")
        store.drive(store.commands_once(commands))
        assert client.mget(names) == [b"kept"] * 3
        assert client.dbsize() == 3
    store.close()


def test_the_doctor_agrees(stage_for: Callable[[str], Stage]) -> None:
    stage = stage_for("operator")
    store = open_store(stage.url)
    by_name = {one.name: one for one in store.drive(examine(store))}
    assert by_name["rights"].verdict is CheckResult.OK
    assert by_name["commands"].verdict is CheckResult.OK
    for right in ("zrank", "hset", "xgroup|create"):
        stage.give([one for one in stage.rights if one != right])
        (found,) = [one for one in store.drive(examine(store)) if one.name == "rights"]
        assert (found.verdict, found.found) == (CheckResult.FAIL, f"refused: {right}")
        assert f"+{right} " in found.cure


def test_a_reader_uses_the_scripts_that_others_have_loaded(
    stage_for: Callable[[str], Stage],
) -> None:
    """It may not load one, since a script may be endless."""
    stage = stage_for("reader")
    stage.cast().declare()
    stage.ask("SCRIPT", "FLUSH")
    reader = open_store(stage.url)
    look = Inspect("orders", ["x"])
    with pytest.raises(ConfigError, match="may not load scripts: another role loads"):
        reader.drive(reader.run(look))
    with Producer(stage.plain) as producer:
        producer.send("orders", 1, id="x", delay="1h")
    (found,) = reader.drive(reader.run(look))
    assert found.waiting_due_ms is not None


def test_lines_of_a_file_mean_the_same(stage_for: Callable[[str], Stage]) -> None:
    stage = stage_for("consumer")
    line = acl.line(
        "lisa-consumer", ["consumer"], stage.rights, KEYS, password=PASSWORD, style="file"
    )
    before = stage.ask("ACL", "LIST")
    stage.ask("ACL", "DELUSER", stage.user)
    stage.ask("ACL", "SETUSER", *line.split()[1:])
    assert stage.ask("ACL", "LIST") == before


# The table of rights, and the output of `lisa acl`


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
    assert unprobed == ["select", "subscribe"]


DANGEROUS = (
    *(
        "flushall",
        "flushdb",
        "keys",
        "config|get",
        "config|set",
        "script|flush",
        "script|kill",
        "shutdown",
    ),
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
        keys = ("{*", "topics", "managers", "relays", "loaders", "scheduled", "schema")
        assert f" resetkeys {' '.join(f'~lisa:{key}' for key in keys)} " in line
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
        f"ACL SETUSER shop-manager on resetpass #{digest} resetkeys ~shop:{{* ~shop:topics "
        "~shop:managers ~shop:relays ~shop:loaders ~shop:scheduled ~shop:schema resetchannels "
        "&shop:wake -@all +"
    )
    assert "s3cret" not in line
    line = lisa("producer", "consumer", "--user", "shop", "--nopass", "--format", "file").strip()
    assert line.startswith("user shop on resetpass nopass resetkeys ")
    granted = {word[1:] for word in line.split() if word.startswith("+")}
    assert granted == {*acl.rights_of(["producer"]), *acl.rights_of(["consumer"])}


def test_waiting_for_replicas_needs_a_permission() -> None:
    for role in acl.ROLES:
        waits = role in ("producer", "gateway", "operator", "relay")
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
