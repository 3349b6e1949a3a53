"""Settings of the roles, from files, the environment and options; the reference page."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from lisa import AsyncProducer, Consumer, Manager, Producer
from lisa.core.model.clock import parse_zone
from lisa.core.model.envelope import decode_body
from lisa.core.model.errors import ConfigError
from lisa.core.model.lanes import Rate
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.settings import (
    ROLES,
    ConsumerSettings,
    GatewaySettings,
    ManagerSettings,
    ProducerSettings,
    RoleSettings,
)
from lisa.core.settings.names import fields, kebab, sections
from lisa.core.settings.sections import ScheduleSettings
from tests.generators import DOCS, generator
from tests.programs import python
from tests.servers import ROOT

CONFIGS = ROOT / "configs"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration file; returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "lisa.yml"
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return written


def refusal(role: type[RoleSettings], path: Path | None = None, **overrides: Any) -> str:
    """The one-line error of loading a role's settings."""
    with pytest.raises(ConfigError) as caught:
        role.load(path, **overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


ALL_KEYS = {
    kebab(inner) for name in fields(ROLES) for inner in (name, *fields(sections(ROLES, name)))
}


def test_the_originals_files() -> None:
    settings = ManagerSettings.load(CONFIGS / "manager.yml")
    server = settings.manager_server
    assert server.crontab_move_to_ready_queue == "0/1 * * * * ?"
    assert (server.range_start, server.range_end, server.count) == ("-", "+", 20)
    assert settings.enabled
    expected = {
        "ack_timeout": timedelta(seconds=10),
        "retry_delays": RetryPolicy((20_000,) * 10),
        "max_ready": 10_000,
    }
    assert settings.topic_options() == {"mystream": expected, "topic2": expected}
    producer = ProducerSettings.load(CONFIGS / "producer.yml")
    topics = {"mystream": ("group-1",), "topic2": ("group-2",)}
    assert settings.topics() == producer.topics() == topics
    consumer = ConsumerSettings.load(CONFIGS / "consumer.yml")
    assert consumer.consumer_server.poll_timeout_millis == 5_000
    assert consumer.consumer_server.poll_batch_size == 10
    assert [entry.consumer for entry in consumer.groups] == ["consumer-1", "consumer-2"]


def test_the_reference_page_matches_the_models() -> None:
    rendered = generator("generate_settings").render()
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == rendered, "run: python docs/generate_settings.py"
    rows = [line for line in rendered.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    for row in rows:
        assert len(row.rstrip(" |").rpartition("| ")[2]) > 5, row


@pytest.mark.parametrize("role", ROLES)
def test_a_full_file_shows_the_defaults_and_leaves_out_no_key(role: Any) -> None:
    path = CONFIGS / f"{role.role}.full.yml"
    text, loaded, default = path.read_text(encoding="utf-8"), role.load(path), role.load()
    for other in CONFIGS.glob("*.full.yml"):
        assert role.load(other).topics() == {"orders": ("lisa",)}
    update = {name: () for name in ("groups", "schedules") if name in role.model_fields}
    assert loaded.model_copy(update=update) == default
    names = [*role.model_fields, *(ScheduleSettings.model_fields if "schedules" in update else ())]
    for name in role.model_fields:
        names += getattr(type(getattr(default, name)), "model_fields", {})
    assert [name for name in names if f" {name.replace('_', '-')}:" not in text] == []


def test_commented_examples_are_valid(write: Write) -> None:
    tried = set()
    for role in ROLES:
        path = CONFIGS / f"{role.role}.full.yml"
        lines, full = path.read_text(encoding="utf-8").splitlines(), role.load(path)
        for number, line in enumerate(lines):
            key = line.lstrip().removeprefix("# ").partition(": ")[0]
            if not line.lstrip().startswith("# ") or key not in ALL_KEYS:
                continue
            kept = lines.copy()
            kept[number] = line.replace("# ", "", 1)
            if key == "retry":
                others = ("delay-time", "max-retry")
                kept = [each for each in kept if not any(one in each for one in others)]
            if key in ("tls-cert-file", "tls-key-file"):
                kept = [each.replace("# tls", "tls") for each in kept]
            if key.startswith("tls-"):
                kept = [each.replace("url: redis:", "url: rediss:") for each in kept]
            assert role.load(write("\n".join(kept))) != full, line
            tried.add(key)
    expected = {"retry", "http", "zone", "target", "ack-timeout", "tls-key-file", "push-allow"}
    assert expected <= tried


def test_three_spellings_are_one_key_and_one_file_serves_several_roles(write: Write) -> None:
    for root, section, key in (
        ("lisa-delay-queue", "consumer-server", "poll-timeout-millis"),
        ("lisaDelayQueue", "consumerServer", "pollTimeoutMillis"),
        ("lisa_delay_queue", "consumer_server", "poll_timeout_millis"),
    ):
        path = write(f"other: {{port: 80}}\n{root}: {{{section}: {{{key}: 70}}, manager-server: }}")
        assert ConsumerSettings.load(path).consumer_server.poll_timeout_millis == 70
        assert ManagerSettings.load(path) == ManagerSettings.load()


def test_yaml_numbers_stay_text_and_merged_keys_may_be_overridden(write: Write) -> None:
    path = write("""
        first: &first {topic: 007, consumer: 8, max-length: 1}
        second: &second {<<: *first, topic: orders}
        lisa-delay-queue:
          redis: {password: 0123}
          zone: +10:30
          groups:
            - *first
            - {<<: *second}
            - {<<: *second, topic: a, group: 1e3, consumer: no, max-length: 2}
        """)
    settings = ManagerSettings.load(path)
    groups = [(one.topic, one.consumer, one.options()) for one in settings.groups]
    assert groups == [
        ("007", "8", {"max_ready": 1}),
        ("orders", "8", {"max_ready": 1}),
        ("a", "no", {"max_ready": 2}),
    ]
    assert settings.topics()["a"] == ("1e3",)
    assert settings.redis.password is not None
    assert settings.redis.password.get_secret_value() == "0123"
    assert ProducerSettings.load(path).zone == parse_zone("+10:30"), "not 630, as in YAML 1.1"
    twice = write("lisa-delay-queue: {groups: [&a {topic: a}, {<<: *a, topic: b, topic: c}]}")
    assert "topic is given twice" in refusal(ManagerSettings, twice)


def test_data_of_users_are_read_as_yaml_1_2(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any depth, whatever the keys; a number that would not keep its digits stays text."""
    body = """{topic: 7, token: 1e3, list: [{zone: 5, group: no}, 9:30, 010, 1_000, 0x1F, ~, true],
        day: 2027-01-01, at: 12:30:45, 'on': on, yes: 1.5}"""
    expected = {
        "topic": 7,
        "token": 1000.0,
        "day": "2027-01-01",
        "at": "12:30:45",
        "on": "on",
        "list": [{"zone": 5, "group": "no"}, "9:30", "010", "1_000", 31, None, True],
        "yes": 1.5,
    }
    schedules = f"[{{name: a, topic: 7, every: 1m, body: {body}}}]"
    path = write(f"lisa-delay-queue: {{schedules: {schedules}}}")
    monkeypatch.setenv("LISA_SCHEDULES", schedules)
    for (found,) in (ManagerSettings.load(path).schedules, ManagerSettings.load().schedules):
        assert (found.topic, found.body) == ("7", expected)
        assert decode_body(found.definition().kind, found.definition().encoded_body) == expected


def test_secrets_are_not_shown(write: Write) -> None:
    settings = ProducerSettings.load(redis={"url": "redis://:hunter2@x", "password": "hunter2"})
    assert "hunter2" not in repr(settings)
    path = write("lisa-delay-queue: {redis: {url: 'hunter2@x', password: [hunter2]}}")
    assert "hunter2" not in refusal(ProducerSettings, path)
    text = "lisa-delay-queue: {{gateway-server: {{token: {0}}}}}"
    token = GatewaySettings.load(write(text.format("0123"))).gateway_server.token
    assert token is not None
    assert token.get_secret_value() == "0123"
    assert "0123" not in refusal(GatewaySettings, write(text.format("['0123']")))


def test_an_archive_is_a_directory_or_in_s3(write: Write) -> None:
    text = "lisa-delay-queue: {{gateway-server: {{archive: {0}}}}}"
    for given, read in (("/old", "/old"), ("s3a://shop/old", "s3://shop/old")):
        assert GatewaySettings.load(write(text.format(given))).gateway_server.archive == read
    assert "an s3: URL" in refusal(GatewaySettings, write(text.format("gs://shop/old")))


def test_precedence_from_flag_to_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("lisa-delay-queue: {consumer-server: {concurrency: 2, grace: 3s, processes: 4}}")
    monkeypatch.setenv("LISA_CONSUMER_SERVER__CONCURRENCY", "5")
    monkeypatch.setenv("LISA_CONSUMER_SERVER__PROCESSES", "6")
    options = {"concurrency": 7, "processes": None}
    server = ConsumerSettings.load(path, consumer_server=options, http=None).consumer_server
    assert (server.concurrency, server.processes) == (7, 6)
    assert (server.grace, server.poll_timeout_millis) == (timedelta(seconds=3), 5_000)
    for name, value in (
        ("REDIS_URL", "redis://elsewhere:1/2"),
        ("ENABLED", "false"),
        ("HANDLERS", "shop.a, shop.b"),
        ("MANAGER_SERVER__TIMEOUT", "3000"),
        ("MANAGER_SERVER__RETRY", '{"fixed": {"delay": "1s", "count": 2}}'),
        ("GROUPS", '[{"topic": "orders", "max-length": 5}]'),
        ("REDIS__PASSWORD", "[not json"),
        ("CONFIG", str(write("lisa-delay-queue: {prefix: named}"))),
    ):
        monkeypatch.setenv(f"LISA_{name}", value)
    settings = ManagerSettings.load()
    assert (settings.redis.url, settings.prefix) == ("redis://elsewhere:1/2", "named")
    assert not settings.enabled
    assert settings.handlers == ("shop.a", "shop.b")
    retry = RetryPolicy((1_000, 1_000))
    expected = {"ack_timeout": timedelta(seconds=3), "retry_delays": retry, "max_ready": 5}
    assert settings.topic_options() == {"orders": expected}


def test_spring_names_the_server(write: Write) -> None:
    for section, url, password in (
        ("{host: cache, port: 6380, password: s3, database: 4}", "redis://cache:6380/4", "s3"),
        ("{host: cache, lettuce: {pool: {max-active: 8}}}", "redis://cache:6379/0", None),
        ("{host: cache, ssl: true}", "rediss://cache:6379/0", None),
        ("{host: cache, ssl: 'true'}", "rediss://cache:6379/0", None),
        ("{host: cache, ssl: {bundle: b}}", "rediss://cache:6379/0", None),
        ("{host: cache, ssl: {enabled: 'false'}}", "redis://cache:6379/0", None),
        ("{url: 'redis://u:p@cache:1/2', timeout: 5000}", "redis://u:p@cache:1/2", None),
    ):
        redis = ProducerSettings.load(write(f"spring: {{redis: {section}}}")).redis
        given = redis.password.get_secret_value() if redis.password else None
        assert (redis.url, given) == (url, password)
    for section, said in (
        ("{host: '${HOST:x}'}", "spring.redis.host is a placeholder"),
        ("{host: cache, ssl: '${TLS:true}'}", "spring.redis.ssl is a placeholder"),
        ("{host: cache, ssl: maybe}", "spring.redis.ssl is true or false, not 'maybe'"),
        ("{cluster: {nodes: a:1}}", "spring.redis.cluster is not supported"),
    ):
        path = write(f"spring: {{redis: {section}}}\nlisa-delay-queue: {{}}")
        assert said in refusal(ManagerSettings, path)
    assert ManagerSettings.load(path, redis="redis://x").redis.url == "redis://x"


def test_a_url_from_a_higher_layer_ignores_credentials_and_tls_files_of_lower_layers(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    spring = write("spring: {redis: {host: cache, password: s3}}\nlisa-delay-queue: {prefix: p}")
    redis = ProducerSettings.load(spring, redis="redis://other").redis
    assert (redis.url, redis.password) == ("redis://other", None)
    own = write("lisa-delay-queue: {redis: {url: redis://cache, password: s3, socket-timeout: 9s}}")
    assert ProducerSettings.load(own).redis.password is not None
    monkeypatch.setenv("LISA_REDIS_URL", "redis://other")
    redis = ProducerSettings.load(own).redis
    assert (redis.url, redis.password) == ("redis://other", None)
    assert redis.socket_timeout == timedelta(seconds=9)
    tls = write("lisa-delay-queue: {redis: {url: rediss://cache, tls-ca-file: ca.pem}}")
    assert ProducerSettings.load(tls, redis="redis://other").redis.tls_ca_file is None
    assert ProducerSettings.load(tls).redis.tls_ca_file is None
    monkeypatch.setenv("LISA_REDIS_URL", "rediss://other")
    assert ProducerSettings.load(tls).redis.tls_ca_file == Path("ca.pem")


def test_several_groups_of_one_topic(write: Write) -> None:
    path = write("""
        lisa-delay-queue:
          groups:
            - {topic: orders, group: mail, ack-timeout: 30s, moving-size: 5000}
            - topic: orders
              group: bill
              capacity: 9
              moving-size: 20
              group-options: {keyRate: 2/s}
            - {topic: other, retry-delays: "0,2m~0.5", retention: 0}
        """)
    settings = ManagerSettings.load(path)
    assert settings.topics() == {"orders": ("mail", "bill"), "other": ()}
    assert settings.topic_options() == {
        "orders": {
            "ack_timeout": timedelta(seconds=30),
            "capacity": 9,
            "key_rate@bill": Rate(2),
        },
        "other": {"retry_delays": RetryPolicy((0, 120_000), 0.5), "retention": timedelta(0)},
    }
    assert settings.moving_sizes() == {"orders": 250}
    path = write("""
        lisa-delay-queue:
          manager-server: {timeout: 1s, max-retry-count: 2}
          groups: [{topic: a, ack-timeout: 5s, retry-delays: []}, {topic: b}]
        """)
    own, defaults = ManagerSettings.load(path).topic_options().values()
    assert own == {"ack_timeout": timedelta(seconds=5), "retry_delays": RetryPolicy(())}
    retry = RetryPolicy((20_000, 20_000))
    assert defaults == {"ack_timeout": timedelta(seconds=1), "retry_delays": retry}


def test_a_disabled_role_is_not_created(write: Write) -> None:
    """One file may configure several roles; a disabled role does not run."""
    path = write("lisa-delay-queue: {enabled: false, groups: [{topic: orders}]}")
    for role in (Manager, Consumer, Producer, AsyncProducer):
        with pytest.raises(ConfigError, match="enabled is false"):
            role.from_config(path)


def test_settings_are_frozen_and_load_neither_client_nor_scheduler() -> None:
    settings = ManagerSettings.load()
    with pytest.raises(ValueError, match="frozen"):
        settings.prefix = "other"
    check = (
        "import sys; from lisa.core.settings import ManagerSettings; ManagerSettings.load();"
        "print(sorted({'redis', 'apscheduler', 'rich'} & set(sys.modules)))"
    )
    assert python("-c", check).stdout == "[]\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{manager-server: {tiemout: 1}}", ["manager-server.tiemout", "did you mean timeout"]),
        ("{managerServer: {countt: 1}}", ["managerServer.countt", "did you mean count"]),
        ("{timeout: 1}", ["unknown key timeout", "belongs under manager-server"]),
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
        ("{groups: [{topic: a, retention: 5s}]}", ["groups[0].retention", "0, or 20s to 3650d"]),
        ("{groups: [{topic: a, moving-size: 0}]}", ["groups[0].moving-size", "0"]),
        ("{groups: [{topic: a, ack-timeout: 10}]}", ["groups[0].ack-timeout", "no unit"]),
        ("{manager-server: {crontab-clean-stream: '61 * * * * ?'}}", ["clean-stream", "'61'"]),
        ("{manager-server: {timeout: 5}}", ["manager-server.timeout", "out of range"]),
        ("{manager-server: {range-start: 5-0}}", ["manager-server.range-start", "'-'"]),
        ("{manager-server: {retry: 1s, delay-time: 5}}", ["manager-server", "delay-time"]),
        ("{manager-server: 5}", ["manager-server is a section"]),
        ("{count: 1, manager-server: }", ["unknown key count"]),
        ("{logLevel: info, log-level: info}", ["log-level is given twice"]),
        ("{prefix: 8080}", ["prefix", "put it in quotes"]),
        ("{http: 65536}", ["http", "HOST:PORT", "65536"]),
        ("{prefix: 'a{b}'}", ["prefix", "a{b}"]),
        ("{enabled: maybe}", ["enabled", "'maybe'"]),
        ("{redis: {url: localhost}}", ["redis.url", "write redis://localhost"]),
        ("{redis: {tls-cert-file: a}}", ["redis", "must be set together"]),
        ("{enabled: true, enabled: false}", ["enabled is given twice", "line 1"]),
        ("{manager-server: {count: true}}", ["manager-server.count", "true is not a number"]),
        *(
            (f"{{schedules: [{{name: a, topic: t, every: 1m, {wrong}}}]}}", ["schedules[0]", *why])
            for wrong, why in {
                "until: 20271231": ["until: 20271231 is not a date", "'2026-12-24T09:00'"],
                "start: 2027": ["start: 2027 is not a date", "'2026-12-24T09:00'"],
                "start: 2026-12": ["start: '2026-12' is not a date"],
                "until: true": ["until: True is not a date"],
                "count: true": ["count", "true is not a number"],
                "headers: {zone: 7}": ["headers.zone", "put it in quotes"],
            }.items()
        ),
        *(
            (f"{{schedules: [{{name: a, topic: t, every: 1m, body: {body}}}]}}", ["is given twice"])
            for body in ("{1: a, '1': b}", "{1: a, 1.0: b}", "{0x10: a, 16: b}", "{1: a, true: b}")
        ),
        ("[", ["not valid YAML", "line"]),
        ("{? [a, b] : 1}", ["not valid YAML", "unhashable key"]),
        ("5", ["lisa-delay-queue is a section"]),
        ("!!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ],
)
def test_a_refusal_names_file_key_and_cure(write: Write, body: str, words: list[str]) -> None:
    path = write(f"lisa-delay-queue: {body}")
    text = refusal(ManagerSettings, path)
    assert text.startswith(str(path))
    assert [word for word in words if word not in text] == []


def test_a_poll_longer_than_the_sockets_patience(write: Write) -> None:
    path = write("lisa-delay-queue: {redis: {socket-timeout: 5s}}")
    text = refusal(ConsumerSettings, path)
    assert "poll-timeout-millis (5000)" in text
    assert "socket-timeout (5s)" in text
    assert ManagerSettings.load(path).redis.socket_timeout is not None
    long_poll = write("lisa-delay-queue: {consumer-server: {poll-timeout-millis: 60000}}")
    assert ConsumerSettings.load(long_poll).redis.socket_timeout is None


def test_refusals_name_the_source_of_the_value(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, latin = tmp_path / "none.yml", tmp_path / "latin.yml"
    assert refusal(ManagerSettings, missing).startswith(f"{missing}: No such file")
    assert "directory" in refusal(ManagerSettings, tmp_path)
    latin.write_bytes(b"lisa-delay-queue: {prefix: \xe9}")
    assert "not UTF-8" in refusal(ManagerSettings, latin)
    assert "rename lisa-delay-que" in refusal(ManagerSettings, write("lisa-delay-que: {count: 1}"))
    assert "begin it with" in refusal(ManagerSettings, write(""))
    assert refusal(ConsumerSettings, consumer_server={"concurrency": 0}).startswith("options:")
    assert "unknown key htp; did you mean http?" in refusal(ConsumerSettings, htp="x")
    for kubernetes in ("LISA_REDIS_PORT", "LISA_REDIS_PORT_6379_TCP_ADDR", "LISA_SERVICE_HOST"):
        monkeypatch.setenv(kubernetes, "tcp://10.0.0.1:6379")
    monkeypatch.setenv("LISA_SHOP_COLOUR", "blue")
    assert ManagerSettings.load() == ManagerSettings()
    monkeypatch.setenv("LISA_CONSUMER_SERVER__CONCURRENCY", "many")
    text = refusal(ConsumerSettings)
    assert text.startswith("environment: consumer-server.concurrency")
    assert "'many'" in text
    monkeypatch.setenv("LISA_REDIS_URI", "redis://x")
    assert "did you mean LISA_REDIS_URL" in refusal(ManagerSettings)
    monkeypatch.setenv("LISA_NOTHING__HERE", "1")
    assert "LISA_NOTHING__HERE" in refusal(ManagerSettings)
