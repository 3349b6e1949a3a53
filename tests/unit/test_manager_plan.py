"""A manager's plan, from arguments and from YAML."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.errors import ConfigError, InvalidMessage, LisaError
from lisa.core.settings import ManagerSettings
from lisa.manager.plan import Plan, Schedules, TopicPlan, differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


def plan(
    topics: Mapping[str, Mapping[str, object]] | Iterable[str] = (),
    groups: Mapping[str, Iterable[str]] | None = None,
) -> Plan:
    return Plan.of(topics, groups or {}, default_group="lisa", schedules=Schedules())


def test_names_alone_declare_nothing() -> None:
    assert plan(["orders"]).topics == {"orders": TopicPlan()}
    assert plan(["orders"]).groups_for("orders") == ("lisa",)


def test_a_mapping_declares_options_and_groups() -> None:
    made = plan({"orders": {"ack_timeout": timedelta(seconds=30), "group": "a", "max-ready": 5}})
    assert made.topics["orders"].options == {"ack_timeout": "30000", "max_ready": "5"}
    assert made.topics["orders"].groups == ("a",)
    assert made.groups_for("orders") == ("a",)


def test_groups_of_both_arguments_are_merged() -> None:
    made = plan({"orders": {"groups": ["a", "b"]}}, {"orders": ["b", "c"], "mails": ["m"]})
    assert made.topics["orders"].groups == ("b", "c", "a")
    assert made.topics["mails"] == TopicPlan(groups=("m",))


@pytest.mark.parametrize(
    ("topics", "groups", "said"),
    [
        ("orders", {}, "is a string"),
        ({"orders": {"acktimeout": "1s"}}, {}, "ack_timeout"),
        ({"orders": {"paused": True}}, {}, "lisa topic pause"),
        ({"orders": {"groups": [7]}}, {}, "group 7"),
        (["a b"], {}, "topic 'a b'"),
        ([], {"orders": "billing"}, "list of names"),
        ([], {"orders": ["no good"]}, "group 'no good'"),
    ],
)
def test_invalid_arguments_are_refused(topics: Any, groups: Any, said: str) -> None:
    with pytest.raises(LisaError) as refused:
        plan(topics, groups)
    assert isinstance(refused.value, ConfigError | InvalidMessage)
    assert said in str(refused.value)


YAML = """
lisa-delay-queue:
  manager-server:
    crontab-move-to-ready-queue: '0/2 * * * * ?'
    count: 20
    timeout: 30000
  default-group: house
  groups:
    - {topic: orders, group: a, moving-size: 20, max-length: 7}
    - {topic: orders, group: b}
    - {topic: mails}
"""


def test_a_configuration_file_gives_the_same_plan(tmp_path: Path) -> None:
    file = tmp_path / "manager.yml"
    file.write_text(YAML, encoding="utf-8")
    made = Plan.from_settings(ManagerSettings.load(file))
    assert made.topics["orders"] == TopicPlan(
        groups=("a", "b"), options={"ack_timeout": "30000", "max_ready": "7"}, batch=20
    )
    assert made.topics["mails"].options == {"ack_timeout": "30000"}
    assert made.groups_for("mails") == ("house",)
    assert (made.batch("orders"), made.batch("mails"), made.batch("other")) == (20, 250, 250)
    assert (made.window, made.schedules.move) == (20, "0/2 * * * * ?")


def test_differences_are_described() -> None:
    old = plan({"a": {"ack_timeout": "1s", "group": "g"}, "gone": {}})
    new = plan({"a": {"ack_timeout": "2s", "capacity": 5, "group": "h"}, "b": {}})
    assert differences(old, new) == [
        "topic a: ack_timeout 1000 -> 2000",
        "topic a: capacity default -> 5",
        "topic a: group h added",
        "topic a: group g no longer configured; use `lisa topic group remove` to remove it",
        "topic b: new",
        "topic gone: no longer configured; its messages and keys stay",
    ]
    assert differences(new, new) == []
    assert differences(new, replace(new, default_group="h")) == ["default-group lisa -> h"]
