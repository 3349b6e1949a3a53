import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lisa import AsyncProducer, Consumer, Manager, Producer
from lisa.core.model.clock import parse_zone
from lisa.core.model.errors import ConfigError
from lisa.core.model.options import encode
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
from lisa.core.settings.schedules import ScheduleSettings
from tests.unit.settings_files import Write, refusal

CONFIGS = Path(__file__).parents[2] / "configs"


ALL_KEYS = {
    kebab(inner) for name in fields(ROLES) for inner in (name, *fields(sections(ROLES, name)))
}


# The files of the original ------------------------------------------------------------------------


def test_the_originals_manager_file() -> None:
    settings = ManagerSettings.load(CONFIGS / "manager.yml")
    server = settings.manager_server
    assert server.crontab_move_to_ready_queue == "0/1 * * * * ?"
    assert server.crontab_clean_stream == "0 */1 * * * ?"
    assert server.crontab_process_pending_message == "0/5 * * * * ?"
    assert (server.range_start, server.range_end, server.count) == ("-", "+", 20)
    assert settings.enabled
    assert settings.topics() == {"mystream": ("group-1",), "topic2": ("group-2",)}
    expected = {
        "ack_timeout": timedelta(seconds=10),
        "retry_delays": RetryPolicy((20_000,) * 10),
        "max_ready": 10_000,
    }
    assert settings.topic_options() == {"mystream": expected, "topic2": expected}
    assert encode(expected)["max_ready"] == "10000"
    assert [entry.consumer for entry in settings.groups] == ["consumer-1", "consumer-2"]


def test_the_originals_producer_file() -> None:
    settings = ProducerSettings.load(CONFIGS / "producer.yml")
    assert settings.topics() == {"mystream": ("group-1",), "topic2": ("group-2",)}
    assert settings.redis.url == "redis://localhost:6379/0"


def test_the_originals_consumer_file() -> None:
    settings = ConsumerSettings.load(CONFIGS / "consumer.yml")
    assert settings.consumer_server.poll_timeout_millis == 5_000
    assert settings.consumer_server.poll_batch_size == 10
    assert settings.groups[1].consumer == "consumer-2"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.full.yml")), ids=lambda path: path.name)
def test_every_role_loads_every_full_file(role: type[RoleSettings], path: Path) -> None:
    assert role.load(path).topics() == {"orders": ("lisa",)}


@pytest.mark.parametrize("role", ROLES)
def test_a_full_file_shows_the_defaults_and_leaves_out_no_key(role: Any) -> None:
    text = (CONFIGS / f"{role.role}.full.yml").read_text(encoding="utf-8")
    loaded, default = role.load(CONFIGS / f"{role.role}.full.yml"), role.load()
    examples = {"groups": (), "schedules": ()}
    update = {name: none for name, none in examples.items() if name in role.model_fields}
    assert loaded.model_copy(update=update) == default
    for inner in ScheduleSettings.model_fields if "schedules" in update else ():
        assert f" {inner.replace('_', '-')}:" in text, inner
    for name in role.model_fields:
        assert f" {name.replace('_', '-')}:" in text, name
        section = getattr(default, name)
        for inner in getattr(type(section), "model_fields", {}):
            assert f" {inner.replace('_', '-')}:" in text, inner


def test_commented_examples_are_valid(write: Write) -> None:
    tried = set()
    for role in ROLES:
        lines = (CONFIGS / f"{role.role}.full.yml").read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            example = line.lstrip().removeprefix("# ")
            key = example.partition(": ")[0]
            if not line.lstrip().startswith("# ") or key not in ALL_KEYS:
                continue
            kept = lines.copy()
            kept[number] = line.replace("# ", "", 1)
            if key == "retry":
                kept = [
                    each for each in kept if "delay-time" not in each and "max-retry" not in each
                ]
            if key in ("tls-cert-file", "tls-key-file"):
                kept = [each.replace("# tls", "tls") for each in kept]
            if key.startswith("tls-"):
                kept = [each.replace("url: redis:", "url: rediss:") for each in kept]
            full = role.load(CONFIGS / f"{role.role}.full.yml")
            assert role.load(write("\n".join(kept))) != full, line
            tried.add(key)
    expected = {"retry", "http", "zone", "target", "ack-timeout", "tls-key-file", "push-allow"}
    assert expected <= tried


# Spelling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "section", "key"),
    [
        ("lisa-delay-queue", "consumer-server", "poll-timeout-millis"),
        ("lisaDelayQueue", "consumerServer", "pollTimeoutMillis"),
        ("lisa_delay_queue", "consumer_server", "poll_timeout_millis"),
    ],
)
def test_three_spellings_are_one_key(write: Write, root: str, section: str, key: str) -> None:
    path = write(f"{root}: {{{section}: {{{key}: 70}}}}")
    assert ConsumerSettings.load(path).consumer_server.poll_timeout_millis == 70


def test_other_roots_are_ignored_and_one_file_serves_several_roles(write: Write) -> None:
    path = write("""
        server: {port: 8080}
        lisa-delay-queue:
          manager-server: {count: 7}
          consumer-server: {concurrency: 3}
          zone: +08:00
        """)
    assert ManagerSettings.load(path).manager_server.count == 7
    assert ConsumerSettings.load(path).consumer_server.concurrency == 3
    assert ProducerSettings.load(path).zone == parse_zone("+08:00")


def test_text_stays_text_where_yaml_sees_a_number(write: Write) -> None:
    path = write("""
        lisa-delay-queue:
          redis: {password: 0123}
          groups: [{topic: 007, group: 1e3, consumer: no}]
        """)
    settings = ConsumerSettings.load(path)
    assert settings.topics() == {"007": ("1e3",)}
    assert settings.groups[0].consumer == "no"
    assert settings.redis.password is not None
    assert settings.redis.password.get_secret_value() == "0123"


def test_text_that_replaces_a_merged_number_is_kept(write: Write) -> None:
    path = write("""
        first: &first {topic: 007, consumer: 8}
        lisa-delay-queue:
          groups: [*first, {<<: *first, topic: orders}]
        """)
    groups = ConsumerSettings.load(path).groups
    assert [(one.topic, one.consumer) for one in groups] == [("007", "8"), ("orders", "8")]


def test_a_token_may_consist_of_digits_and_is_not_shown(write: Write) -> None:
    text = "lisa-delay-queue: {{gateway-server: {{token: {0}}}}}"
    token = GatewaySettings.load(write(text.format("0123"))).gateway_server.token
    assert token is not None
    assert token.get_secret_value() == "0123"
    assert "0123" not in refusal(GatewaySettings, write(text.format("['0123']")))


def test_an_offset_is_not_read_as_a_base_60_number(write: Write) -> None:
    # YAML 1.1 reads 10:30 as 630.
    path = write("lisa-delay-queue: {zone: +10:30}")
    assert ProducerSettings.load(path).zone == parse_zone("+10:30")


def test_an_archive_is_a_directory_or_in_s3(write: Write) -> None:
    text = "lisa-delay-queue: {{gateway-server: {{archive: {0}}}}}"
    for given, read in (("old", "old"), ("/old", "/old"), ("s3a://shop/old", "s3://shop/old")):
        settings = GatewaySettings.load(write(text.format(given)))
        assert settings.gateway_server.archive == read
    assert "an s3: URL" in refusal(GatewaySettings, write(text.format("gs://shop/old")))


def test_a_key_without_a_value_has_its_default(write: Write) -> None:
    path = write("lisa-delay-queue: {groups: , manager-server: {count: }}")
    assert ManagerSettings.load(path) == ManagerSettings.load()


# Precedence ---------------------------------------------------------------------------------------


def test_flag_above_environment_above_file_above_default(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("lisa-delay-queue: {consumer-server: {concurrency: 2, grace: 3s, processes: 4}}")
    monkeypatch.setenv("LISA_CONSUMER_SERVER__CONCURRENCY", "5")
    monkeypatch.setenv("LISA_CONSUMER_SERVER__PROCESSES", "6")
    server = ConsumerSettings.load(
        path, consumer_server={"concurrency": 7, "processes": None}, http=None
    ).consumer_server
    assert server.concurrency == 7
    assert server.processes == 6
    assert server.grace == timedelta(seconds=3)
    assert server.poll_timeout_millis == 5_000


def test_the_environment_alone(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    monkeypatch.setenv("LISA_REDIS_URL", "redis://elsewhere:1/2")
    monkeypatch.setenv("LISA_ENABLED", "false")
    monkeypatch.setenv("LISA_HANDLERS", "shop.a, shop.b")
    monkeypatch.setenv("LISA_MANAGER_SERVER__TIMEOUT", "3000")
    monkeypatch.setenv("LISA_MANAGER_SERVER__RETRY", '{"fixed": {"delay": "1s", "count": 2}}')
    monkeypatch.setenv("LISA_GROUPS", '[{"topic": "orders", "max-length": 5}]')
    monkeypatch.setenv("LISA_REDIS__PASSWORD", "[not json")
    settings = ManagerSettings.load()
    assert settings.redis.url == "redis://elsewhere:1/2"
    assert not settings.enabled
    assert settings.handlers == ("shop.a", "shop.b")
    assert settings.topic_options() == {
        "orders": {
            "ack_timeout": timedelta(seconds=3),
            "retry_delays": RetryPolicy((1_000, 1_000)),
            "max_ready": 5,
        }
    }
    monkeypatch.setenv("LISA_CONFIG", str(write("lisa-delay-queue: {prefix: named}")))
    assert ManagerSettings.load().prefix == "named"


# The server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "url", "password"),
    [
        ("{host: cache, port: 6380, password: s3, database: 4}", "redis://cache:6380/4", "s3"),
        ("{host: cache}", "redis://cache:6379/0", None),
        (
            "{host: cache, ssl: true, lettuce: {pool: {max-active: 8}}}",
            "rediss://cache:6379/0",
            None,
        ),
        ("{host: cache, ssl: 'true'}", "rediss://cache:6379/0", None),
        ("{host: cache, ssl: {bundle: b}}", "rediss://cache:6379/0", None),
        ("{host: cache, ssl: {enabled: 'false'}}", "redis://cache:6379/0", None),
        ("{url: 'redis://u:p@cache:1/2', timeout: 5000}", "redis://u:p@cache:1/2", None),
    ],
)
def test_spring_names_the_server(
    write: Write, section: str, url: str, password: str | None
) -> None:
    redis = ProducerSettings.load(write(f"spring: {{redis: {section}}}")).redis
    assert redis.url == url
    assert (redis.password.get_secret_value() if redis.password else None) == password


def test_a_url_from_a_higher_layer_ignores_credentials_of_lower_layers(
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


def test_a_url_without_tls_from_a_higher_layer_ignores_the_tls_files_of_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = write("lisa-delay-queue: {redis: {url: rediss://cache, tls-ca-file: ca.pem}}")
    assert ProducerSettings.load(tls, redis="redis://other").redis.tls_ca_file is None
    monkeypatch.setenv("LISA_REDIS_URL", "redis://other")
    assert ProducerSettings.load(tls).redis.tls_ca_file is None
    monkeypatch.setenv("LISA_REDIS_URL", "rediss://other")
    assert ProducerSettings.load(tls).redis.tls_ca_file == Path("ca.pem")


def test_spring_only_settings_are_refused_unless_a_url_is_given(write: Write) -> None:
    cluster = write("spring: {redis: {cluster: {nodes: a:1}}}\nlisa-delay-queue: {}")
    assert "spring.redis.cluster is not supported" in refusal(ManagerSettings, cluster)
    assert ManagerSettings.load(cluster, redis="redis://x").redis.url == "redis://x"
    placeholder = write("spring: {redis: {host: '${HOST:x}'}}")
    assert "spring.redis.host is a placeholder" in refusal(ManagerSettings, placeholder)
    unknown_tls = write("spring: {redis: {host: cache, ssl: '${TLS:true}'}}")
    assert "spring.redis.ssl is a placeholder" in refusal(ManagerSettings, unknown_tls)
    no_tls = write("spring: {redis: {host: cache, ssl: maybe}}")
    assert "spring.redis.ssl is true or false, not 'maybe'" in refusal(ManagerSettings, no_tls)


def test_secrets_are_not_shown(write: Write) -> None:
    settings = ProducerSettings.load(redis={"url": "redis://:hunter2@x", "password": "hunter2"})
    assert "hunter2" not in repr(settings)
    path = write("lisa-delay-queue: {redis: {url: 'hunter2@x', password: [hunter2]}}")
    assert "hunter2" not in refusal(ProducerSettings, path)


# Topics -------------------------------------------------------------------------------------------


def test_several_groups_of_one_topic(write: Write) -> None:
    path = write("""
        lisa-delay-queue:
          groups:
            - {topic: orders, group: mail, ack-timeout: 30s, moving-size: 5000}
            - {topic: orders, group: bill, capacity: 9, moving-size: 20}
            - {topic: other, retry-delays: "0,2m~0.5", retention: 0}
        """)
    settings = ManagerSettings.load(path)
    assert settings.topics() == {"orders": ("mail", "bill"), "other": ()}
    assert settings.topic_options() == {
        "orders": {"ack_timeout": timedelta(seconds=30), "capacity": 9},
        "other": {"retry_delays": RetryPolicy((0, 120_000), 0.5), "retention": timedelta(0)},
    }
    assert settings.moving_sizes() == {"orders": 250}


def test_a_topics_own_options_win_over_the_managers(write: Write) -> None:
    path = write("""
        lisa-delay-queue:
          manager-server: {timeout: 1s, max-retry-count: 2}
          groups: [{topic: a, ack-timeout: 5s, retry-delays: []}, {topic: b}]
        """)
    assert ManagerSettings.load(path).topic_options() == {
        "a": {"ack_timeout": timedelta(seconds=5), "retry_delays": RetryPolicy(())},
        "b": {
            "ack_timeout": timedelta(seconds=1),
            "retry_delays": RetryPolicy((20_000, 20_000)),
        },
    }


def test_settings_are_frozen() -> None:
    settings = ManagerSettings.load()
    with pytest.raises(ValueError, match="frozen"):
        settings.prefix = "other"


def test_loading_settings_imports_neither_client_nor_scheduler() -> None:
    check = (
        "import sys; from lisa.core.settings import ManagerSettings; ManagerSettings.load();"
        "print(sorted({'redis', 'apscheduler', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("role", [Manager, Consumer, Producer, AsyncProducer])
def test_a_disabled_role_is_not_created(role: Any, tmp_path: Path) -> None:
    """One file may configure several roles; a disabled role does not run."""
    path = tmp_path / "lisa.yml"
    path.write_text("lisa-delay-queue: {enabled: false, groups: [{topic: orders}]}\n")
    with pytest.raises(ConfigError, match="enabled is false"):
        role.from_config(path)
