from pathlib import Path

import pytest

from lisa.core.settings import ConsumerSettings, ManagerSettings
from tests.unit.settings_files import Write, refusal


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{manager-server: {tiemout: 1}}", ["manager-server.tiemout", "did you mean timeout"]),
        ("{managerServer: {countt: 1}}", ["managerServer.countt", "did you mean count"]),
        ("{timeout: 1}", ["unknown key timeout", "belongs under manager-server"]),
        ("{groups: [{topic: a, grp: b}]}", ["groups[0].grp", "did you mean group"]),
        ("{groups: {topic: a}}", ["groups is not a list"]),
        ("{groups: [a]}", ["groups[0] is a section"]),
        ("{groups: [{group: a}]}", ["groups[0].topic", "missing"]),
        ("{groups: [{topic: a/b}]}", ["groups[0].topic", "'a/b'"]),
        ("{groups: [{topic: a, group: g}, {topic: a, group: g}]}", ["'a'", "'g'", "twice"]),
        ("{groups: [{topic: a}, {topic: a}]}", ["'a'", "listed twice"]),
        (
            "{groups: [{topic: a, group: g, max-length: 1}, {topic: a, group: h, max-length: 2}]}",
            ["'a'", "disagree about max-length"],
        ),
        ("{groups: [{topic: a, max-length: 0}]}", ["groups[0].max-length", "0"]),
        (
            "{groups: [{topic: a, retention: 5s}]}",
            ["groups[0].retention", "5s is out of range; write 0, or 20s to 3650d"],
        ),
        ("{groups: [{topic: a, moving-size: 0}]}", ["groups[0].moving-size", "0"]),
        ("{groups: [{topic: a, ack-timeout: 10}]}", ["groups[0].ack-timeout", "no unit"]),
        ("{groups: [{topic: a, retry-delays: 5x}]}", ["groups[0].retry-delays", "5x"]),
        (
            "{manager-server: {crontab-clean-stream: '61 * * * * ?'}}",
            ["manager-server.crontab-clean-stream", "second '61'"],
        ),
        ("{manager-server: {timeout: 5}}", ["manager-server.timeout", "out of range"]),
        ("{manager-server: {timeout: ten}}", ["manager-server.timeout", "'ten'"]),
        ("{manager-server: {range-start: 5-0}}", ["manager-server.range-start", "'-'"]),
        ("{manager-server: {max-retry-count: -1}}", ["manager-server.max-retry-count", "-1"]),
        ("{manager-server: {retry: 1s, delay-time: 5}}", ["manager-server", "delay-time"]),
        ("{manager-server: 5}", ["manager-server is a section"]),
        ("{count: 1, manager-server: }", ["unknown key count"]),
        ("{logLevel: info, log-level: info}", ["log-level is given twice"]),
        ("{log-level: loud}", ["log-level", "'loud'"]),
        ("{prefix: 8080}", ["prefix", "put it in quotes"]),
        ("{http: 65536}", ["http", "HOST:PORT", "65536"]),
        ("{http: true}", ["http", "HOST:PORT", "True"]),
        ("{http: 'localhost'}", ["http", "HOST:PORT"]),
        ("{prefix: 'a{b}'}", ["prefix", "a{b}"]),
        ("{enabled: maybe}", ["enabled", "'maybe'"]),
        ("{redis: {url: localhost}}", ["redis.url", "write redis://localhost"]),
        ("{redis: {tls-cert-file: a}}", ["redis", "must be set together"]),
        ("{default-group: 'a b'}", ["default-group", "'a b'"]),
        ("{enabled: true, enabled: false}", ["enabled is given twice", "line 1"]),
        ("[", ["not valid YAML", "line"]),
        ("{? [a, b] : 1}", ["not valid YAML", "unhashable key"]),
        ("5", ["lisa-delay-queue is a section"]),
    ],
)
def test_a_managers_refusal_names_file_key_and_cure(
    write: Write, body: str, words: list[str]
) -> None:
    path = write(f"lisa-delay-queue: {body}")
    text = refusal(ManagerSettings, path)
    assert text.startswith(str(path))
    for word in words:
        assert word in text


def test_a_key_that_overrides_a_merged_one_is_not_given_twice(write: Write) -> None:
    path = write(
        """
        ours:
          of:
            all:
              first: &first {topic: a, max-length: 1}
              second: &second {<<: *first, topic: b}
        lisa-delay-queue:
          groups: [{<<: *first}, {<<: *second}, {<<: *second, topic: c, max-length: 2}]
        """
    )
    found = ManagerSettings.load(path).groups
    assert [one.topic for one in found] == ["a", "b", "c"]
    assert [one.options() for one in found] == [{"max_ready": n} for n in (1, 1, 2)]
    twice = write("lisa-delay-queue: {groups: [&a {topic: a}, {<<: *a, topic: b, topic: c}]}")
    assert "topic is given twice" in refusal(ManagerSettings, twice)


def test_a_poll_longer_than_the_sockets_patience(write: Write) -> None:
    path = write("lisa-delay-queue: {redis: {socket-timeout: 5s}}")
    text = refusal(ConsumerSettings, path)
    assert "poll-timeout-millis (5000)" in text
    assert "socket-timeout (5s)" in text
    assert ManagerSettings.load(path).redis.socket_timeout is not None
    long_poll = write("lisa-delay-queue: {consumer-server: {poll-timeout-millis: 60000}}")
    assert ConsumerSettings.load(long_poll).redis.socket_timeout is None


def test_refusals_name_the_source_of_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(ConsumerSettings, None, consumer_server={"concurrency": 0}).startswith(
        "options:"
    )
    assert "unknown key htp; did you mean http?" in refusal(ConsumerSettings, None, htp="x")
    monkeypatch.setenv("LISA_CONSUMER_SERVER__CONCURRENCY", "many")
    text = refusal(ConsumerSettings, None)
    assert text.startswith("environment: consumer-server.concurrency")
    assert "'many'" in text


def test_unknown_names_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for kubernetes in ("LISA_REDIS_PORT", "LISA_REDIS_PORT_6379_TCP_ADDR", "LISA_SERVICE_HOST"):
        monkeypatch.setenv(kubernetes, "tcp://10.0.0.1:6379")
    monkeypatch.setenv("LISA_SHOP_COLOUR", "blue")
    assert ManagerSettings.load() == ManagerSettings()
    monkeypatch.setenv("LISA_REDIS_URI", "redis://x")
    assert "did you mean LISA_REDIS_URL" in refusal(ManagerSettings, None)
    monkeypatch.delenv("LISA_REDIS_URI")
    monkeypatch.setenv("LISA_NOTHING__HERE", "1")
    assert "LISA_NOTHING__HERE" in refusal(ManagerSettings, None)


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    missing = tmp_path / "none.yml"
    assert refusal(ManagerSettings, missing).startswith(f"{missing}: No such file")
    assert "directory" in refusal(ManagerSettings, tmp_path)
    latin = tmp_path / "latin.yml"
    latin.write_bytes(b"lisa-delay-queue: {prefix: \xe9}")
    assert "not UTF-8" in refusal(ManagerSettings, latin)
    assert "rename lisa-delay-que" in refusal(ManagerSettings, write("lisa-delay-que: {count: 1}"))
    assert "begin it with" in refusal(ManagerSettings, write(""))
    pickled = write("lisa-delay-queue: !!python/object/apply:os.getcwd []")
    assert "not valid YAML" in refusal(ManagerSettings, pickled)
