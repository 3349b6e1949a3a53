"""The commands on a real server, and `lisa init`, whose files start every role."""

import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from lisa import Consumer
from lisa.cli import relay
from lisa.cli.init import FILES
from lisa.cli.main import main
from lisa.core.settings import ManagerSettings, ProducerSettings, RelaySettings
from lisa.core.store import presence
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.embedded.server import free_port
from tests.deploy.manifests import MAINS, SETTINGS
from tests.programs import run
from tests.roles import Cast
from tests.servers import connect, wait_until


@pytest.fixture(autouse=True)
def environment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the test's server."""
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)


def lisa(*arguments: str, code: int = 0, stdin: bytes | str | None = None) -> Result:
    """Run a command."""
    result = CliRunner().invoke(main, arguments, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def ask(*arguments: str, code: int = 0, stdin: str | None = None) -> Any:
    """Run a command with --json; its parsed output."""
    return json.loads(lisa(*arguments, "--json", code=code, stdin=stdin).stdout)


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url)


def kill(cast: Cast, *ids: str, reason: str = "boom") -> None:
    """Send messages that end in garbage."""
    for one in ids:
        cast.send(message_id=one)
    failures = [Failure(entry.id, entry.entry, reason, "discard") for entry in cast.take()]
    cast.store.call(Fail("orders", "g", failures))


def test_a_message_from_sending_to_cancelling() -> None:
    def changed(*arguments: str, code: int = 0) -> str:
        (message,) = ask(*arguments, code=code)["messages"]
        assert message["id"] == one
        return str(message["outcome"])

    sent = lisa("send", "orders", '{"order": 42}', "--delay", "30m", "--header", "k=v").stdout
    one = sent.strip()
    found = ask("get", "orders", one)
    assert (found["state"], found["body"]) == ("waiting", {"order": 42})
    assert found["headers"] == {"k": "v"}
    assert re.search(r"(?s)waiting.*\(in (30|29|28)m", lisa("get", "orders", one).stdout)
    assert lisa("reschedule", "orders", one, "--delay", "1h").stdout.split() == [one, "rescheduled"]
    assert ask("get", "orders", one)["due_ms"] - found["due_ms"] >= 29 * 60_000
    local = ("--at-local", "2030-12-24T09:00", "--tz", "Asia/Tokyo")
    assert changed("reschedule", "orders", one, *local) == "rescheduled"
    assert ask("get", "orders", one)["due_ms"] == 1_924_300_800_000
    assert changed("fire", "orders", one) == "rescheduled"
    assert changed("cancel", "orders", one) == "cancelled"
    assert ask("get", "orders", one)["state"] == "cancelled"
    assert changed("reschedule", "orders", one, "--delay", "1h", code=1) == "done"


def test_messages_with_a_key() -> None:
    later = ("--key", "order 42", "--delay", "30m")
    made = lisa("send", "orders", "x", *later).stdout.strip()
    assert re.fullmatch(r"[\w~]{16}", made), "the part after the key"
    sent = ask("send", "orders", "1", *later, "--id", "own")
    assert (sent["id"], sent["key"]) == ("order 42\x1fown", "order 42")
    known = lisa("send", "orders", "1", *later, "--id", "own").stderr
    assert "id order 42 / own is already known" in known
    of_key = ("orders", "order 42")
    assert lisa("key", "count", *of_key).stdout == "2\n"
    assert ask("key", "count", *of_key)["count"] == 2
    assert {one["id"] for one in ask("key", "list", *of_key)["messages"]} == {
        "order 42\x1fown",
        f"order 42\x1f{made}",
    }
    shown = lisa("key", "list", *of_key).stdout
    assert re.search(rf"order 42 / {made} +waiting +in (30|29)m", shown), shown
    assert re.search(r"order 42 / own +in (30|29)m", lisa("list", "orders").stdout)
    assert {one["key"] for one in ask("list", "orders")["messages"]} == {"order 42"}
    changed = ask("key", "reschedule", *of_key, "--shift", "-20m")["messages"]
    assert {one["outcome"] for one in changed} == {"rescheduled"}
    assert re.search(r"in (10|9)m", lisa("key", "list", *of_key).stdout)
    at = ("--at", "2030-12-24T09:00", "--tz", "Asia/Tokyo")
    assert "order 42 / own  rescheduled" in lisa("key", "reschedule", *of_key, *at).stdout
    found = ask("get", "orders", "own", "--key", "order 42")
    assert (found["due_ms"], found["key"]) == (1_924_300_800_000, "order 42")
    assert "order 42 / own" in lisa("get", "orders", "own", "--key", "order 42").stdout
    assert "order 42 / no is unknown" in lisa("get", "orders", "no", *later[:2], code=1).stderr
    one = ("orders", "own", "--key", "order 42")
    assert lisa("reschedule", *one, "--delay", "1h").stdout == "order 42 / own  rescheduled\n"
    assert lisa("fire", *one).stdout == "order 42 / own  rescheduled\n"
    assert "due: " in lisa("next", "orders", "--id", "own", "--key", "order 42").stdout
    assert lisa("cancel", *one).stdout == "order 42 / own  cancelled\n"
    assert ask("key", "fire", *of_key)["messages"][0]["outcome"] == "rescheduled"
    assert ask("key", "cancel", *of_key)["messages"][0]["outcome"] == "cancelled"
    assert lisa("key", "cancel", *of_key).stdout == ""
    for wrong in ((), ("--delay", "1h", "--shift", "1h"), ("--shift", "5"), (*at, "--at-ms", "1")):
        lisa("key", "reschedule", *of_key, *wrong, code=2)
    lisa("key", "count", "orders", "", code=2)


def test_garbage_with_a_key(cast: Cast) -> None:
    kill(cast.declare(), *(f"k\x1f{n}" for n in range(3)))
    assert "k / 0" in lisa("garbage", "list", "orders").stdout
    (shown,) = ask("garbage", "show", "orders", "0", "--key", "k")
    assert (shown["id"], shown["key"]) == ("k\x1f0", "k")
    missing = lisa("garbage", "show", "orders", "9", "--key", "k", code=1).stderr
    assert "k / 9 is not in garbage" in missing
    assert ask("garbage", "requeue", "orders", "0", "--key", "k")["requeued"] == 1
    assert ask("garbage", "purge", "orders", "1", "--key", "k", "--yes")["purged"] == 1
    lisa("garbage", "purge", "orders", "--all", "--key", "k", "--yes", code=2)
    outcomes = ask("key", "cancel", "orders", "k")["messages"]
    assert {one["id"]: one["outcome"] for one in outcomes} == {
        "k\x1f0": "cancelled",
        "k\x1f2": "cancelled",
    }


def test_known_ids_and_ids_like_options() -> None:
    send, options = ("send", "orders"), ("--id=-a", "--delay", "1h")
    sent = {"topic": "orders", "id": "-a", "key": None, "outcome": "accepted"}
    assert ask(*send, "1", *options) == sent
    assert ask(*send, "2", *options)["outcome"] == "duplicate"
    assert ask(*send, "3", *options, "--on-duplicate", "replace")["outcome"] == "replaced"
    assert ask(*send, "4", *options, "--on-duplicate", "update")["outcome"] == "updated"
    reject = (*send, "4", *options, "--on-duplicate", "reject")
    assert ask(*reject, code=1)["outcome"] == "rejected"
    known = "lisa: nothing was sent: id -a is already known on topic orders (waiting)\n"
    assert (lisa(*reject, code=1).stdout, lisa(*reject, code=1).stderr) == ("", known)
    kept = lisa(*send, "2", *options)
    assert (kept.stdout, kept.stderr) == ("-a\n", known)
    assert '"body":4' in lisa("get", "--json", "orders", "--", "-a").stdout.replace(" ", "")
    assert lisa("cancel", "orders", "--", "-a").stdout.split() == ["-a", "cancelled"]


def test_settings_from_the_environment_or_a_file(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invoke(*command: str, **environment: str | None) -> Result:
        return CliRunner(env=environment).invoke(main, command)

    path, pauses = tmp_path / "lisa.yml", list[float]()
    path.write_text("lisa-delay-queue: {durability: replicas(1), patience: 0s}\n")
    monkeypatch.setattr(
        "lisa.core.redis.flow.time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    )
    lisa("send", "orders", "41", "--id", "a", "--delay", "1h")
    away = f"redis://127.0.0.1:{free_port()}/0"
    for environment in (
        {"LISA_DURABILITY": "replicas(1)", "LISA_PATIENCE": "0s"},
        {"LISA_CONFIG": str(path)},
    ):
        for command in (["send", "orders", "42"], ["cancel", "orders", "a"]):
            result = invoke(*command, "--redis", redis_url, **environment)
            assert result.exit_code == 3, result.output  # the test's server has no replica
            assert "replica" in result.output
        result = invoke("get", "orders", "a", "--redis", away, **environment)
        assert (result.exit_code, pauses) == (3, [])
    result = invoke("get", "orders", "a", LISA_PATIENCE="5")
    assert (result.exit_code, "patience" in result.output) == (2, True)
    path.write_text(
        f"lisa-delay-queue:\n  prefix: conf\n  redis: {{url: '{redis_url}'}}\n  zone: '+01:00'\n"
    )
    sent = ("--config", str(path), "send", "orders", "x", "--at", "2040-01-01T00:00:00")
    one = invoke(*sent, LISA_REDIS_URL=None).stdout.strip()
    found = invoke("get", "orders", one, "--json", LISA_CONFIG=str(path))
    assert json.loads(found.stdout)["due"] == "2039-12-31T23:00:00.000Z"
    assert "waiting" in lisa("--prefix", "conf", "get", "orders", one).stdout
    assert "waiting" in lisa("get", "orders", one, "--prefix=conf").stdout
    assert "unknown" in lisa("get", "orders", one, code=1).stderr


def test_forms_of_a_body_and_due_times() -> None:
    deep = "[" * 60_000 + "]" * 60_000  # too deep to parse
    for arguments, body, encoding in (
        (["--", "-5"], -5, "json"),
        (["42", "--text"], "42", "text"),
        (["plain words"], "plain words", "text"),
        (['"quoted"', "--json-body"], "quoted", "text"),
        (["[1, null]"], [1, None], "json"),
        ([deep], deep, "text"),
    ):
        one = lisa("send", "orders", "--delay", "1h", *arguments).stdout.strip()
        found = ask("get", "orders", one)
        assert (found["body"], found["body_encoding"]) == (body, encoding)
    one = lisa("send", "orders", "-", "--delay", "1h", stdin=b"\xff\xfe").stdout.strip()
    assert ask("get", "orders", one)["body_encoding"] == "base64"
    lisa("send", "due", "x", "--id", "a", "--at", "2040-01-01T00:00:00+00:00")
    lisa("send", "due", "x", "--id", "b", "--at", "2040-01-01T01:00:00", "--tz", "+01:00")
    lisa("send", "due", "x", "--id", "c", "--at-ms", "2208988800000")
    assert {ask("get", "due", one)["due_ms"] for one in "abc"} == {2_208_988_800_000}
    rows = ask("list", "due", "--due-before", "2040-01-01T00:00:00.001Z")["messages"]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert ask("list", "due", "--due-before", "2040-01-01T00:00:00Z")["messages"] == []


def test_a_file_of_messages_and_where_it_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "bodies"
    path.write_text('{"n": 1}\nplain\n3\n', encoding="utf-8-sig")  # editors on Windows write a mark
    said = ask("send", "orders", "--file", str(path), "--delay", "1h")
    assert said == {"topic": "orders"} | dict.fromkeys(Sent, 0) | {"accepted": 3}
    assert ask("send", "orders", "--file", "-", stdin="a\nb\n")["accepted"] == 2
    rows = ask("list", "orders")["messages"]
    bodies = [ask("get", "orders", row["id"])["body"] for row in rows]
    assert bodies == ["a", "b", {"n": 1}, "plain", 3]
    assert ask("send", "orders", "--file", "-", "--text", stdin="\n \nx\r\n\r\n\n")["accepted"] == 1
    refused = lisa("send", "orders", "--file", str(tmp_path / "missing"), "--json", code=2)
    assert refused.stderr.count("\n") == 1
    # The error says from which line to go on; sending the file again would repeat the others.
    lisa("topic", "set", "part", "capacity=1300", "--create")
    later = ("send", "part", "--file", "-", "--delay", "1h")
    said = lisa(*later, code=1, stdin="1\n" * 2_000).stderr
    sent = ask("topic", "show", "part")["waiting"]
    assert 1_000 <= sent <= 1_300
    assert f"; the first {sent} lines were sent\n" in said
    lisa("topic", "set", "part", "capacity=unlimited")
    said = lisa(*later, "--json-body", code=2, stdin="\n1\n" * 700 + "{\n").stderr
    assert "line 1401: the body is not JSON" in said
    messages = ask("topic", "show", "part")["waiting"] - sent
    assert f"; the first {2 * messages} lines" in said


def test_late_policies_and_ramps(cast: Cast) -> None:
    cast.declare()
    due = str(cast.now_ms() - 60_000)
    lisa("send", "orders", "x", "--id", "a", "--at-ms", due, "--late", "skip after 10m")
    assert cast.store.ask("HGET", cast.keys.policy, "a") == b"*;600000,skip"
    lisa("send", "orders", "x", "--late", "skip", code=2)
    lisa("send", "orders", "x", "--id", "b", "--cost", "5", "--slack", "1m", "--delay", "1h")
    assert cast.store.ask("HGET", cast.keys.policy, "b") == b"*;;5,60000"
    lisa("send", "orders", "x", "--cost", "0", code=2)
    lisa("schedules", "set", "orders", "s", "x", "--every", "1h", "--late", "collapse after 5m")
    assert ask("schedules", "show", "orders", "s")["late"] == "collapse after 5m"
    lisa("schedules", "set", "orders", "s", "x", "--every", "1h", "--key", "k")
    assert ask("schedules", "show", "orders", "s")["key"] == "k"
    assert "k / s@" in lisa("schedules", "run-now", "orders", "s").stdout
    lisa("topic", "set", "orders", "late=skip after 30m", "ramp=2/m newest first")
    shown = lisa("topic", "show", "orders").output
    for line in (r"ramp +2/m newest first", r"backlog on the ramp +1", r"ramp ends in +30s"):
        assert re.search(line, shown), shown
    found = ask("topic", "show", "orders")
    assert (found["ramp_backlog"], found["ramp_ms"]) == (1, 30_000)
    assert (found["options"]["late"], found["skipped"]) == ("skip after 30m", 0)


def test_distances_use_the_servers_clock(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    cast.declare()
    kill(cast, "dead")
    lisa("send", "orders", "x", "--id", "later", "--delay", "10h")
    lisa("schedules", "set", "orders", "hourly", "x", "--every", "1h")
    here = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: here() + int(25 * 3.6e12))
    assert re.search(r"\(in (10h|9h)", lisa("get", "orders", "later").stdout)
    assert re.search(r"died .* ago\)", lisa("garbage", "show", "orders", "dead").stdout)
    for command in (["list", "orders"], ["next", "orders", "hourly", "--count", "1"]):
        assert re.search(r" \(in \d+m", lisa("schedules", *command).stdout), command


def test_unknown_objects_give_a_negative_result() -> None:
    assert "unknown" in lisa("get", "orders", "nope", code=1).stderr
    assert ask("get", "orders", "nope", code=1) == {"topic": "orders", "id": "nope", "state": None}
    assert "unknown" in lisa("cancel", "orders", "nope", code=1).stdout
    for command in (
        *(["list"], ["garbage", "list"], ["consumers"], ["fsck"], ["top", "--once"]),
        *(["garbage", "requeue", "--all"], ["garbage", "purge", "--all", "--yes"]),
        *(["topic", "show"], ["topic", "pause"], ["topic", "delete"], ["topic", "journal", "show"]),
        ["schedules", "list"],
    ):
        said = lisa(*command, "nope", code=1)
        assert (said.stdout, said.stderr) == ("", "lisa: topic nope is unknown\n"), command
    lisa("topic", "group", "add", "orders", "g")
    assert "no group" in lisa("topic", "group", "remove", "orders", "h", code=1).stderr
    retries = ("list", "orders", "--state", "retry")
    assert "not declared" in lisa(*retries, "--group", "h", code=1).stderr
    assert "not a cursor" in lisa("list", "orders", "--cursor", "x", code=2).stderr
    for command in (["garbage", "requeue"], ["schedules", "show"], ["topic", "journal", "forget"]):
        said = lisa(*command, "orders", os.fsdecode(b"\xff"), code=2)
        assert said.stderr == "lisa: '\\udcff' is not UTF-8 text\n"


def test_mistyped_topics_are_named(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on a terminal of 80 columns, where the column of groups is omitted."""
    for _ in range(2):
        lisa("send", "ordres", "x", "--delay", "1h")
    assert lisa("topic", "group", "add", "mails", "g").stderr == "lisa: topic mails is new\n"
    hook = ["topic", "push", "hoks", "https://hooks.example/"]
    assert [lisa(*hook).stderr for _ in range(2)] == ["lisa: topic hoks is new\n", ""]
    lisa("send", "mails", "x")
    consumer = Consumer(cast.url, group="g")
    for topic in ("mails", "rders"):
        consumer.subscribe(topic, print)
    with caplog.at_level(logging.INFO), consumer:
        wait_until(lambda: "reading for group g" in caplog.text.partition("topic rders")[2])
        wait_until(lambda: cast.store.ask("HGET", "lisa:{mails}:stats", "acked@g"))
    said = "nothing was ever sent to it; is the name right?"
    assert [one for one in caplog.messages if said in one] == [f"topic rders: {said}"]
    for topic in ("post", "fails"):
        lisa("topic", "group", "add", topic, "g")
        lisa("send", topic, "x")
    cast.store.ask("HSET", "lisa:{fails}:stats", "retried@g", "1")
    told = [
        "no group takes the messages of ordres (2); is the name right?",
        "no consumer has ever handled the messages of post (1); is the name right?",
        "consumers name a topic that nothing was ever sent to: hoks, rders; is the name right?",
    ]
    monkeypatch.setattr("lisa.cli.output.terminal_width", lambda: 80)
    assert lisa("topics").stderr.splitlines() == [f"lisa: {one}" for one in told]
    checks = {one["check"]: one for one in ask("doctor")["checks"]}
    assert (checks["topics"]["verdict"], checks["topics"]["found"]) == ("warn", "; ".join(told))


def test_topic_options() -> None:
    said = lisa("topic", "set", "orders", "ack-timeout=30s", code=1).stderr
    assert said == "lisa: topic orders is unknown; to create it, add --create\n"
    assert ask("topics") == []
    assert "1 changed" in lisa("topic", "set", "orders", "ack-timeout=30s", "--create").stdout
    assert "did you mean orders?" in lisa("topic", "set", "ordres", "paused=yes", code=1).stderr
    shown = lisa("topic", "show", "orders").stdout
    rows = [re.split("  +", row) for row in shown.split("\n\n")[0].splitlines()[2:]]
    lisa("topic", "set", "orders", *[f"{name}={value}" for name, value in rows])
    assert lisa("topic", "show", "orders").stdout == shown
    assert "unchanged" in lisa("topic", "set", "orders", "ack_timeout=30s").stdout
    lisa("topic", "set", "orders", "retry_delays=0,2m~0.5", "capacity=7")
    options = ask("topic", "show", "orders")["options"]
    assert (options["ack_timeout_ms"], options["retry_delays_ms"]) == (30_000, [0, 120_000])
    assert (options["retry_jitter"], options["capacity"]) == (0.5, 7)
    lisa("topic", "unset", "orders", "capacity", "retry-delays")
    options = ask("topic", "show", "orders")["options"]
    assert (options["capacity"], len(options["retry_delays_ms"])) == (None, 10)
    assert "2m" not in lisa("topic", "show", "orders").stdout
    assert "did you mean" in lisa("topic", "set", "orders", "ack_timeut=3s", code=2).stderr
    assert "out of range" in lisa("topic", "set", "orders", "ack_timeout=1ms", code=2).stderr
    assert "no topic option 'what'" in lisa("topic", "unset", "orders", "what", code=2).stderr
    # A body so large blocks the server.
    assert "9000000 bytes" in lisa("topic", "set", "orders", "max-body-bytes=9000000").stderr
    assert not lisa("topic", "set", "orders", "max-body-bytes=8388608").stderr
    lisa("topic", "set", "orders", "max-groups=1")
    lisa("topic", "group", "add", "orders", "g")
    assert "1 changed" in lisa("topic", "set", "orders", "key-rate=2/s", "--group", "g").stdout
    assert ask("topic", "show", "orders")["group_options"] == {"g": {"key_rate": "2/s"}}
    assert "key_rate@g" in lisa("topic", "show", "orders").stdout
    assert "1 changed" in lisa("topic", "unset", "orders", "key_rate", "--group", "g").stdout
    assert ask("topic", "show", "orders")["group_options"] == {}
    said = lisa("topic", "set", "orders", "key_rate=2/s", "--group", "h", code=1).stderr
    assert "group 'h' is not declared" in said
    said = lisa("topic", "set", "orders", "capacity=2", "--group", "g", code=2).stderr
    assert "capacity applies to all groups" in said
    assert "its option max_groups" in lisa("topic", "group", "add", "orders", "h", code=1).stderr


def test_a_key_has_limits_of_its_own() -> None:
    assert "unknown" in lisa("key", "limit", "orders", "a", "--weight", "2", code=1).stderr
    lisa("topic", "group", "add", "orders", "eu")
    none = dict.fromkeys(("group", "rate", "concurrency", "weight"))
    assert ask("key", "limit", "orders", "a") == {"topic": "orders", "key": "a", **none}
    given = ("--rate", "2/s", "--burst", "5", "--concurrency", "4", "--weight", "3")
    assert "limits of key a are set" in lisa("key", "limit", "orders", "a", *given).stdout
    assert "unchanged" in lisa("key", "limit", "orders", "a", *given).stdout
    own = {"rate": "2/s, burst 5", "concurrency": 4, "weight": 3}
    assert ask("key", "limit", "orders", "a") == {"topic": "orders", "key": "a", **none, **own}
    lisa("key", "limit", "orders", "a", "--rate", "5 per 90s", "--group", "eu")
    for key in ("b", "/", "ü"):
        lisa("key", "limit", "orders", key, "--weight", "2")
    found = ask("key", "limits", "orders")
    assert found["cursor"] is None
    of_group = {"key": "a", **none, "group": "eu", "rate": "5 per 90s"}
    assert found["keys"] == [
        {"key": "/", **none, "weight": 2},
        {"key": "a", **none, **own},
        *({"key": key, **none, "weight": 2} for key in ("b", "ü")),
        of_group,
    ]
    paged: list[dict[str, Any]] = []
    cursor = None
    while not paged or cursor is not None:
        more = () if cursor is None else ("--cursor", cursor)
        page = ask("key", "limits", "orders", "--limit", "2", *more)
        paged, cursor = paged + page["keys"], page["cursor"]
    assert paged == found["keys"]
    shown = lisa("key", "limits", "orders", "--limit", "4")
    assert re.search(r"a +- +2/s, burst 5 +4 +3", shown.stdout)
    assert "more: --cursor '/ü'" in shown.stderr
    lisa("key", "limit", "orders", "a", "--weight", "2")
    assert ask("key", "limit", "orders", "a")["rate"] is None, "limits are replaced as a whole"
    assert "removed" in lisa("key", "limit", "orders", "a", "--clear").stdout
    assert "unchanged" in lisa("key", "limit", "orders", "a", "--clear").stdout
    lisa("key", "limit", "orders", "a", "--clear", "--group", "eu")
    assert [one["key"] for one in ask("key", "limits", "orders")["keys"]] == ["/", "b", "ü"]
    for wrong in ("--burst 2", "--clear --weight 2", "--rate 2", "--weight 0"):
        lisa("key", "limit", "orders", "a", *wrong.split(), code=2)
    said = lisa("key", "limit", "orders", "a", "--weight", "2", "--group", "g", code=1).stderr
    assert "group 'g' is not declared" in said


def test_a_topic_is_paused_and_its_groups_and_itself_removed(cast: Cast) -> None:
    lisa("topic", "group", "add", "orders", "g")
    assert "unchanged" in lisa("topic", "group", "add", "orders", "g").stdout
    lisa("topic", "group", "add", "orders", "other")
    assert "paused" in lisa("topic", "pause", "orders").stdout
    assert ask("topics")[0]["paused"] is True
    lisa("send", "orders", "x", "--id", "a")
    assert cast.store.call(Promote("orders")).paused
    assert ask("topic", "resume", "orders")["changed"] is True
    assert ask("topic", "resume", "orders")["changed"] is False
    assert cast.store.call(Promote("orders")).moved == 2  # for two groups
    assert [one["ready"] for one in ask("topic", "group", "list", "orders")] == [1, 1]
    remove = ("topic", "group", "remove", "orders")
    assert "nothing was changed" in lisa(*remove, "g", code=1, stdin="n\n").stderr
    lisa(*remove, "g", "--yes")
    assert [one["group"] for one in ask("topic", "group", "list", "orders")] == ["other"]
    assert ask("get", "orders", "a")["state"] == "ready"
    assert "1 messages purged" in lisa(*remove, "other", stdin="y\n").stdout
    assert ask("get", "orders", "a")["state"] == "purged"
    lisa("topic", "group", "add", "bills", "g")
    lisa("send", "bills", "x", "--id", "due")
    lisa("send", "bills", "x", "--id", "later", "--delay", "1d")
    refused = lisa("topic", "delete", "bills", code=1, stdin="n\n").stderr
    assert "Topic bills has 2 messages (groups: g). Delete it?" in refused
    assert "nothing was changed" in refused
    said = lisa("topic", "delete", "bills", "--yes").stdout
    assert "1 waiting messages cancelled, 1 others purged" in said
    lisa("topic", "show", "bills", code=1)
    assert ask("get", "bills", "later")["state"] == "cancelled"


def test_topics_and_their_messages(cast: Cast) -> None:
    cast.declare()
    kill(cast, "dead", reason="too \x1b[31mbad")
    lisa("send", "orders", "x", "--delay", "1h")
    cast.send(message_id="held")
    cast.take()
    cast.send(message_id="ready")
    (found,) = ask("topics")
    states = ("waiting", "ready", "in_flight", "retry", "garbage")
    assert [found[state] for state in states] == [1, 1, 1, 0, 1]
    assert re.search(r"in (1h|59m)", lisa("topics").stdout)
    for state, one in (("garbage", "dead"), ("in_flight", "held"), ("ready", "ready")):
        (row,) = ask("list", "orders", "--state", state)["messages"]
        assert (row["id"], row["state"], row["group"]) == (one, state, "g")
        assert row.get("consumer") == ("c1" if one == "held" else None)
    assert "\x1b" not in lisa("list", "orders", "--state", "garbage").stdout
    assert re.search(r"(?m)^idle +\d+(\.\d+)?m?s *$", lisa("get", "orders", "held").stdout)
    (shown,) = ask("top", "--once", "--interval", "0.1")["topics"]
    assert (shown["topic"], shown["waiting"], shown["in_per_s"]) == ("orders", 1, 0)


def test_list_continues_from_its_cursor(cast: Cast) -> None:
    ids = ["it's $HOME", *(f"m{n}" for n in range(6))]
    for n, one in enumerate(ids):
        cast.send(message_id=one, delay_ms=60_000 + n)
    said = lisa("list", "orders", "--limit", "1").stderr
    assert said.startswith("more: ")
    rest = lisa("list", "orders", *shlex.split(said)[1:]).stdout  # as typed into a shell
    assert ("m5" in rest, "it's" in rest) == (True, False)
    seen, cursor = list[str](), list[str]()
    while cursor or not seen:
        page = ask("list", "orders", "--limit", "3", *cursor)
        seen += [row["id"] for row in page["messages"]]
        lisa("cancel", "orders", seen[-1])  # the cursor's message is removed
        cursor = ["--cursor", page["cursor"]] if page["cursor"] else []
    assert seen == ids


def test_a_topic_s_journal(redis_url: str) -> None:
    lisa("topic", "set", "orders", "journal=true", "--create")
    assert ask("topic", "journal", "show", "orders")["since_ms"] is None
    for body in ("one", "two"):
        lisa("send", "orders", body, "--delay", "1h")
    with connect(redis_url) as client:
        entries = client.xrange("lisa:{orders}:events")
        record = f"{entries[0][0].decode()} 1 {int(time.time() * 1000)}"
        client.hset("lisa:{orders}:archived", mapping={"nightly": record, "~trimmed": "0 5"})
    found = ask("topic", "journal", "show", "orders")
    assert (found["on"], found["events"], found["first"], found["last"]) == (True, 2, 1, 2)
    assert (found["written"], found["lost"], found["failed"]) == (2, 0, 0)
    (archive,) = found["archives"]
    assert (archive["name"], archive["number"], archive["behind"]) == ("nightly", 1, 1)
    assert "nightly" in lisa("topic", "journal", "show", "orders").stdout
    forget = ("topic", "journal", "forget", "orders", "nightly")
    assert ask(*forget)["changed"] is True
    assert "no archive nightly" in lisa(*forget, code=1).stderr


def test_garbage(cast: Cast) -> None:
    def listed(*options: str) -> list[str]:
        return [row["id"] for row in ask("garbage", "list", "orders", *options)["messages"]]

    cast.declare()
    kill(cast, "a", "b", reason="card declined")
    kill(cast, "c", "d", reason="Timeout")
    assert listed() == list("abcd")
    assert listed("--reason", "TIMEOUT") == ["c", "d"]
    assert listed("--older-than", "1h") == []
    assert "Timeout" in lisa("garbage", "list", "orders").stdout
    (shown,) = ask("garbage", "show", "orders", "a")
    assert (shown["body"], shown["reason"]) == ("x", "card declined")
    assert "card declined" in lisa("garbage", "show", "orders", "a").stdout
    assert "not in garbage" in lisa("garbage", "show", "orders", "z", code=1).stderr
    done = ask("garbage", "requeue", "orders", "a", "z", code=1)
    assert done == {"topic": "orders", "requeued": 1, "not_in_garbage": ["z"]}
    assert ask("get", "orders", "a")["state"] == "retry"
    purge = ("garbage", "purge", "orders")
    assert "nothing was changed" in lisa(*purge, "b", code=1, stdin="n\n").stderr
    assert ask(*purge, "--all", "--reason", "timeout", "--yes")["purged"] == 2
    assert ask("get", "orders", "c")["state"] == "purged"
    assert ask(*purge, "--all", "--older-than", "1h", "--yes")["purged"] == 0
    assert ask("garbage", "requeue", "orders", "--all")["requeued"] == 1
    assert listed() == []


def test_consumers_and_managers(cast: Cast) -> None:
    cast.declare()
    cast.store.drive(cast.store.register(["orders"]))
    record = presence.ConsumerPresence(name="c-1", topic="orders", group="g", concurrency=4)
    cast.store.drive(presence.announce_consumer(cast.store, record))
    cast.store.drive(presence.announce_manager(cast.store, presence.ManagerPresence(name="m-1")))
    assert [(one["name"], one["alive"]) for one in ask("consumers")] == [("c-1", True)]
    assert "c-1" in lisa("consumers", "orders").stdout
    lisa("topic", "group", "add", "other", "g")
    assert ask("consumers", "other") == []
    gone = b'{"name":"m-2","seen_ms":1}'
    cast.store.ask("HSET", cast.store.keys.managers, "m-2", gone)
    managers = [(one["name"], one["alive"]) for one in ask("managers")]
    assert managers == [("m-1", True), ("m-2", False)]
    assert "gone" in lisa("managers").stdout


def test_fsck(cast: Cast) -> None:
    cast.send(message_id="a", delay_ms=60_000)
    assert ask("fsck")["ok"] is True
    mistyped = lisa("fsck", "orders", "ordres", code=1)
    assert "no inconsistencies" in mistyped.stdout
    assert mistyped.stderr == "lisa: topic ordres is unknown; did you mean orders?\n"
    cast.store.ask("ZREM", cast.keys.waiting, "a")
    (finding,) = ask("fsck", code=1)["findings"]
    expected = {"kind": "no-place", "topic": "orders", "group": None, "id": "a", "repaired": False}
    assert finding == expected | {"what": ""}
    assert "run with --repair" in lisa("fsck", code=1).stdout
    assert ask("fsck", "--repair")["repaired"] == 1
    assert ask("fsck")["found"] == 0


def test_schedules() -> None:
    pair = ("orders", "daily")
    cron = ("--cron", "0 9 * * 1-5", "--tz", "Europe/Berlin")
    assert "daily  set" in lisa("schedules", "set", *pair, '{"n": 1}', *cron).output
    assert not ask("schedules", "set", *pair, '{"n": 1}', *cron)["changed"]
    (listed,) = ask("schedules", "list", "orders")["schedules"]
    assert (listed["name"], listed["cron"], listed["body"]) == ("daily", "0 9 * * 1-5", {"n": 1})
    shown = lisa("schedules", "show", *pair).output
    assert "Europe/Berlin" in shown
    assert re.search(r'^body +\{"n":1\}$', shown, re.MULTILINE), "may be copied to `set`"
    ticks = ask("schedules", "next", *pair, "--count", "3")["ticks"]
    assert (len(ticks), ticks[0]) == (3, listed["next"])
    assert lisa("schedules", "next", *pair).output.count(" 09:00:00+0") == 5
    assert ask("schedules", "pause", *pair)["changed"]
    assert "paused" in lisa("schedules", "list", "orders").output
    assert "paused already" in lisa("schedules", "pause", *pair).output
    assert ask("schedules", "resume", *pair)["changed"]
    made = lisa("schedules", "run-now", *pair).output.strip()
    assert ask("get", "orders", made)["headers"]["lisa-schedule"] == "daily"
    week = ("--from", "2026-03-02T00:00+00:00", "--to", "2026-03-08T00:00+00:00")
    assert "5 created, 0 known" in lisa("schedules", "backfill", *pair, *week).output
    assert ask("schedules", "backfill", *pair, *week)["known"] == 5
    lisa("schedules", "set", *pair, "x", "--every", "1h", "--if-version", "1", code=1)
    lisa("schedules", "set", *pair, "x", "--every", "1h", "--cron", "@daily", code=2)
    lisa("schedules", "remove", *pair, stdin="n", code=1)
    assert "removed" in lisa("schedules", "remove", *pair, "--yes").output
    for command in (["show"], ["remove", "--yes"], ["pause"], ["resume"], ["run-now"], ["next"]):
        assert "has no schedule" in lisa("schedules", *command, *pair, code=1).stderr
    lisa("schedules", "backfill", *pair, *week, code=1)


def init(*arguments: str | Path, code: int = 0) -> str:
    """Run `lisa init`; its output."""
    return lisa("init", *map(str, arguments), code=code).output


def test_the_files_of_init_are_for_the_given_server_and_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = tmp_path / "shop", "redis://db.example:7000/2"
    init(folder, "--redis", url, "--prefix", "shop")
    monkeypatch.delenv("LISA_REDIS_URL")
    for role in (*SETTINGS.values(), ProducerSettings):
        settings = role.load(folder / f"{role.role}.yml")
        assert (settings.redis.url, settings.prefix) == (url, "shop")
        assert settings.topics() == {"orders": ("lisa",)}
        assert "# " in (folder / f"{role.role}.yml").read_text()
    assert len(yaml.safe_load((folder / "tokens.yml").read_text())["tokens"]) == 3
    assert ManagerSettings.load(folder / "manager.yml").schedules == (), "only an example"
    assert "  #   - name: daily-report" in (folder / "manager.yml").read_text()


def test_init_writes_files_for_a_relay_if_a_database_is_given(tmp_path: Path) -> None:
    folder, url = tmp_path / "shop", "postgresql://o'shop@db.example/shop?sslmode=require"
    said = init(folder, "--database", url, "--prefix", "shop")
    settings = RelaySettings.load(folder / "relay.yml")
    assert (settings.relay.database, settings.prefix) == (url, "shop")
    assert "lisa-relay --config relay.yml" in said
    assert "enable --now lisa-manager lisa-consumer lisa-relay" in said
    assert url not in (folder / "manager.yml").read_text()
    assert not ManagerSettings.load(folder / "manager.yml").manager_server.relay
    unit = (folder / "systemd" / "lisa-relay.service").read_text().splitlines()
    (command,) = (line for line in unit if line.startswith("ExecStart="))
    program, *arguments = shlex.split(command.removeprefix("ExecStart="))
    assert Path(program).name == "lisa-relay"
    with relay.main.make_context("lisa-relay", arguments) as context:
        assert (folder / context.params["path"]).is_file()
    if shutil.which("systemd-analyze") and Path(program).is_file():
        file = folder / "systemd" / "lisa-relay.service"
        assert run("systemd-analyze", "verify", "--man=no", file).stderr == ""


@pytest.mark.parametrize(
    ("database", "words"),
    [
        ("postgresql://shop:s3cret@db/shop", "LISA_RELAY__DATABASE"),
        ("postgresql://db/shop?user=x&password=s3cret", "LISA_RELAY__DATABASE"),
        ("shop.db", "is a URL such as"),
    ],
)
def test_a_relay_file_holds_no_password(tmp_path: Path, database: str, words: str) -> None:
    said = init(tmp_path, "--database", database, code=2)
    assert words in said
    assert "s3cret" not in said
    assert list(tmp_path.iterdir()) == []


def test_what_init_does_not_write(tmp_path: Path) -> None:
    """Existing files, unless forced, and passwords; an error names the place."""
    said = init(tmp_path, "--redis", "redis://u:s3cret@db/0", code=2)
    assert ("LISA_REDIS__PASSWORD" in said, "s3cret" in said) == (True, False)
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "shop.py"
    kept.write_text("mine = 1\n")
    assert init(tmp_path, code=1) == f"lisa: {kept} exists; --force overwrites\n"
    assert [path.name for path in tmp_path.iterdir()] == ["shop.py"], "nothing else is written"
    assert kept.read_text() == "mine = 1\n"
    init(tmp_path, "--force")
    assert "Consumer" in kept.read_text()
    assert "manager.yml and 8 more exist;" in init(tmp_path, code=1)
    place = kept / "shop"
    assert init(place, code=1) == f"lisa: {place}: Not a directory\n"


def test_init_prints_80_columns_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = init("shop")
    *lines, last = said.splitlines()
    assert max(map(len, lines)) < 80
    assert last.startswith("and Grafana are in ")
    assert (Path(last.partition(" are in ")[2]) / "grafana-dashboard.json").is_file()
    assert "  cd shop\n" in said
    assert json.loads(init("other", "--json")) == {"directory": "other", "files": list(FILES)}


@pytest.mark.parametrize("uid", [os.getuid(), 54321], ids=["own", "without a name"])
def test_the_units_of_init_start_the_roles_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    folder = tmp_path / "100% ours"
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    for name in MAINS:
        (programs / name).symlink_to(Path(sys.executable).parent / name)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(os, "getuid", lambda: uid)
    init(folder)
    units = sorted((folder / "systemd").iterdir())
    assert len(units) == 3
    for unit in units:
        lines = unit.read_text().splitlines()
        assert f"WorkingDirectory={tmp_path}/100%% ours" in lines
        assert ("User=54321" in lines) == (uid == 54321)
        (command,) = (line for line in lines if line.startswith("ExecStart="))
        program, *arguments = shlex.split(command.removeprefix("ExecStart="))
        assert Path(program).is_file()
        assert f"{Path(program).name}.service" == unit.name
        with MAINS[Path(program).name].make_context(program, arguments) as context:
            assert (folder / context.params["path"]).is_file()
        if shutil.which("systemd-analyze"):
            assert run("systemd-analyze", "verify", "--man=no", unit).stderr == ""
