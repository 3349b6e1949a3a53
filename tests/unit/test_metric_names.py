"""All counters are exported, and dashboards and alerts use only exported metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lisa.core.metrics.families import FAMILIES, GROUP_COUNTERS, SECTIONS, TOPIC_COUNTERS
from tests.generators import generator
from tests.promql import family_of, labels_in, metrics_in
from tests.servers import ROOT

CONFIGS = ROOT / "configs"
RULES = CONFIGS / "alerts.yml"
RUNBOOK = "https://docs.example/lisa/how-to/alerts.html"
DASHBOARD = json.loads((CONFIGS / "grafana-dashboard.json").read_text(encoding="utf-8"))
HISTOGRAMS = {name for name, family in FAMILIES.items() if family.kind == "histogram"}
ADDED = {"environment", "instance", "job", "le", "alertname"}
"""Labels that Prometheus, its configuration and its kind of histogram add."""

LEFT_OUT: dict[str, str] = {}
"""Counters of scripts that are not exported, with the reason."""

COUNTED = re.compile(r"count\((?:'([\w:]+)'|(\w+))[^\n]*?(, group)?\)(?: end)?$", re.MULTILINE)


def counters_of_scripts() -> dict[str, bool]:
    """Counters by name in `stats`, and whether they belong to a group."""
    found = {}
    for script in (ROOT / "lua").rglob("*.lua"):
        source = script.read_text(encoding="utf-8")
        calls = [line for line in source.splitlines() if re.search(r"\bcount\(", line)]
        calls = [line for line in calls if "local function" not in line]
        matches = [one for line in calls if (one := COUNTED.search(line.strip()))]
        assert len(matches) == len(calls), f"{script.name}: {calls}"
        for name, variable, group in (one.groups() for one in matches):
            # One name is computed, the final state of acks: acked is counted separately.
            assert name or (script.stem, variable) == ("ack", "state"), (script.name, variable)
            found[name or "expired"] = bool(group)
        found |= dict.fromkeys(re.findall(r"'HINCRBY', STATS, '(\w+)'", source), False)
    return found


def test_every_counter_of_the_scripts_is_exported() -> None:
    found = counters_of_scripts()
    assert found.pop("late:") is True, "lateness is a histogram"
    assert len(found) > 15
    assert {name for name, own in found.items() if not own} - LEFT_OUT.keys() == {*TOPIC_COUNTERS}
    assert {name for name, own in found.items() if own} - LEFT_OUT.keys() == {*GROUP_COUNTERS}


def test_names_follow_prometheus_customs() -> None:
    names = [family.name for section in SECTIONS for family in section.families]
    assert len(names) == len(set(names))
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"lisa_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert bool(family.bounds) == (family.kind == "histogram"), name
        assert not re.search(r"_(ms|millis|minutes|kb|mb)\b|_(bucket|count|sum)$", name), name
        assert family.help.endswith("."), name
        assert "le" not in family.labels


def test_the_reference_page_matches_the_list() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert page == generator("generate_metrics").render(), "run: python docs/generate_metrics.py"


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in read["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """All expressions of the dashboard, the rules and the page about them."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    shown += [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```promql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        shown += [re.sub(r"^#.*$", "", one, flags=re.MULTILINE) for one in block.split("\n\n")]
    return shown + [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("expression", expressions())
def test_expressions_name_what_is_exported(expression: str) -> None:
    named = metrics_in(expression)
    assert named, expression
    known = {family_of(name, HISTOGRAMS) for name in named - {"up"}}
    assert known <= FAMILIES.keys(), known - FAMILIES.keys()
    for name in named:
        if family_of(name, HISTOGRAMS) in HISTOGRAMS:
            assert name.endswith(("_bucket", "_sum", "_count")), f"{name} is a histogram"
    labels = ADDED.union(*(FAMILIES[name].labels for name in known))
    assert labels_in(expression) <= labels, expression


@pytest.mark.parametrize("expression", expressions())
def test_values_reported_by_several_roles_count_once(expression: str) -> None:
    """Managers and gateways export the same topic values, so selectors must be in a `max by`."""
    for found in re.finditer(r"lisa_(topic|managers|server)_\w+", expression):
        if expression.startswith("label_values"):
            continue
        before = expression[: found.start()]
        assert re.search(
            r"\b(max|absent)( by \([\w, ]+\))? ?\((sum by \([\w, ]*instance\) \()?\s*"
            r"((rate|increase|deriv|max_over_time)\()?$",
            before,
        ), expression


@pytest.mark.parametrize("expression", [rule["expr"] for rule in rules()])
def test_rules_keep_environments_apart(expression: str) -> None:
    lists = re.findall(r"\b(?:by|on) \(([^()]*)\)", expression)
    assert all(listed.startswith("environment") for listed in lists if listed), expression
    bare = re.findall(r"\b(?:max|sum|group|count|min)\s*\(", expression)
    assert not bare, f"{bare} aggregates over environments"


def test_the_dashboard_shows_one_environment() -> None:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    variables = [one for one in DASHBOARD["templating"]["list"] if "definition" in one]
    assert variables[0]["name"] == "environment"
    assert not variables[0].get("multi")
    for expression in [*shown, *(one["definition"] for one in variables[1:])]:
        for found in re.finditer(r"\blisa_\w+", expression):
            assert expression[found.end() :].startswith('{environment="$environment"'), expression


def test_metric_names_are_extracted_from_expressions() -> None:
    """Tests the extraction that the tests above use."""
    expression = (
        'max by (topic, nosuch) (rate(lisa_a_bucket{group=~"x lisa_no",state!="y"}[5m])) > 1'
    )
    assert metrics_in(expression) == {"lisa_a_bucket"}
    assert labels_in(expression) == {"topic", "nosuch", "group", "state"}
    assert metrics_in('up{job=~"lisa-.*"} == 0') == {"up"}
    assert family_of("lisa_a_bucket", {"lisa_a"}) == "lisa_a"
    assert family_of("lisa_a_count", set()) == "lisa_a_count"


def test_the_dashboard_can_be_imported_and_read() -> None:
    assert len(panels()) > 20
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in panels():
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= labels_in(target["expr"]), panel["title"]


def test_the_dashboard_shows_how_far_archives_are_behind() -> None:
    """An alert about it exists; the panel shows what led to the alert."""
    behind = "lisa_topic_archive_behind_seconds"
    assert any(behind in rule["expr"] for rule in rules())
    shown = [panel["title"] for panel in panels() if behind in str(panel["targets"])]
    assert shown == ["Archives behind the journal"]


def test_no_panel_overlaps_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_each_alert_has_its_section_of_the_runbook() -> None:
    text = (ROOT / "docs" / "how-to" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [rule["alert"] for rule in rules()]
    for rule in rules():
        section = f"{RUNBOOK}#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == section


def test_alerts_say_what_to_do() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    tested = (ROOT / "tests" / "gateway" / "alerts.test.yml").read_text(encoding="utf-8")
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, rule["alert"]
        assert len(rule["annotations"]["description"]) > 40, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert f"`{rule['alert']}`" in page, rule["alert"]
        assert rule["alert"] in tested, rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= labels_in(rule["expr"]) | {"instance", "job"}, rule["alert"]


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH (Debian: prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(RULES)),
        ("check", "config", str(CONFIGS / "prometheus.yml")),
        ("test", "rules", str(ROOT / "tests" / "gateway" / "alerts.test.yml")),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
