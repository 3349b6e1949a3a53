"""All counters are exported; dashboards and alerts use only those; how numbers are kept."""

import asyncio
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import yaml
from click.testing import CliRunner

import lisa
from lisa.cli.main import main
from lisa.core.delivery.opening import UNKNOWN_ZONES
from lisa.core.metrics.families import FAMILIES, GROUP_COUNTERS, SECTIONS, TOPIC_COUNTERS
from lisa.core.metrics.numbers import Numbers, Spread
from lisa.core.metrics.page import metrics_page
from lisa.core.settings import GatewayServerSettings
from lisa.gateway.access import EVERYTHING
from lisa.gateway.limits import LimitsMiddleware
from lisa.gateway.shares import Meter, Shares
from tests.exposition import Exposed
from tests.generators import generator
from tests.programs import run
from tests.promql import family_of, labels_in, metrics_in
from tests.servers import ROOT

CONFIGS = ROOT / "configs"
RULES = CONFIGS / "alerts.yml"
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
RUNBOOK = "https://docs.example/lisa/how-to/alerts.html"
DASHBOARD = json.loads((CONFIGS / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = [one for one in DASHBOARD["templating"]["list"] if "definition" in one]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
HISTOGRAMS = {name for name, family in FAMILIES.items() if family.kind == "histogram"}
ADDED = {"environment", "instance", "job", "le", "alertname"}
"""Labels that Prometheus, its configuration and its kind of histogram add."""

COUNTED = re.compile(r"count\((?:'([\w:]+)'|(\w+))[^\n]*?(, group)?\)(?: end)?$", re.MULTILINE)


def test_every_counter_of_the_scripts_is_exported() -> None:
    """By name in `stats`, and whether it belongs to a group."""
    counters: dict[str, bool] = {}
    for script in (ROOT / "lua").rglob("*.lua"):
        source = script.read_text(encoding="utf-8")
        calls = re.findall(r"(?m)^(?!local function).*\bcount\(.*", source)
        matches = [one for line in calls if (one := COUNTED.search(line.strip()))]
        assert len(matches) == len(calls), f"{script.name}: {calls}"
        for name, variable, group in (one.groups() for one in matches):
            # One name is computed, the final state of acks: acked is counted separately.
            assert name or (script.stem, variable) == ("ack", "state"), (script.name, variable)
            counters[name or "expired"] = bool(group)
        counters |= dict.fromkeys(re.findall(r"'HINCRBY', STATS, '(\w+)'", source), False)
    counters[UNKNOWN_ZONES] = False  # counted by the caller of a script
    assert counters.pop("late:") is True, "lateness is a histogram"
    assert len(counters) > 15
    for own, exported in ((False, TOPIC_COUNTERS), (True, GROUP_COUNTERS)):
        assert {name for name, of_group in counters.items() if of_group is own} == {*exported}


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


def expressions() -> list[str]:
    """All expressions of the dashboard, the rules and the page about them."""
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```promql\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    told = [re.sub(r"(?m)^#.*$", "", one) for block in blocks for one in block.split("\n\n")]
    defined = [one["definition"] for one in VARIABLES]
    return [*SHOWN, *defined, *told, *(rule["expr"] for rule in ALERTS)]


ONCE = re.compile(
    r"\b(max|absent)( by \([\w, ]+\))? ?\((sum by \([\w, ]*instance\) \()?\s*"
    r"((rate|increase|deriv|max_over_time)\()?$"
)


def test_expressions_name_what_is_exported_and_count_it_once() -> None:
    assert metrics_in('rate(lisa_a_bucket{group=~"x lisa_no"}[5m]) > 1') == {"lisa_a_bucket"}
    for expression in expressions():
        named = metrics_in(expression)
        assert named, expression
        known = {family_of(name, HISTOGRAMS) for name in named - {"up"}}
        assert known <= FAMILIES.keys(), known - FAMILIES.keys()
        for name in named:
            if family_of(name, HISTOGRAMS) in HISTOGRAMS:
                assert name.endswith(("_bucket", "_sum", "_count")), f"{name} is a histogram"
        labels = ADDED.union(*(FAMILIES[name].labels for name in known))
        assert labels_in(expression) <= labels, expression
        # Managers and gateways export the same topic values, so selectors must be in a `max by`.
        for found in re.finditer(r"lisa_(topic|managers|server)_\w+", expression):
            if not expression.startswith("label_values"):
                assert ONCE.search(expression[: found.start()]), expression


def test_rules_and_the_dashboard_keep_environments_apart() -> None:
    for rule in ALERTS:
        lists = re.findall(r"\b(?:by|on) \(([^()]*)\)", rule["expr"])
        assert all(listed.startswith("environment") for listed in lists if listed), rule["expr"]
        bare = re.findall(r"\b(?:max|sum|group|count|min)\s*\(", rule["expr"])
        assert not bare, f"{bare} aggregates over environments"
    first, *others = VARIABLES
    assert (first["name"], first.get("multi", False)) == ("environment", False)
    for expression in [*SHOWN, *(one["definition"] for one in others)]:
        for found in re.finditer(r"\blisa_\w+", expression):
            assert expression[found.end() :].startswith('{environment="$environment"'), expression


def test_the_dashboard_can_be_imported_and_read() -> None:
    assert len(PANELS) > 20
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for one in (panel, *panel["targets"]):
            assert one["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= labels_in(target["expr"]), panel["title"]
    behind = "lisa_topic_archive_behind_seconds"
    shown = [panel["title"] for panel in PANELS if behind in str(panel["targets"])]
    assert shown == ["Archives behind the journal"], "what led to the alert about it"
    cells = [
        (at["x"] + x, at["y"] + y)
        for at in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(at["w"])
        for y in range(at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_alerts_say_what_to_do() -> None:
    runbook = (ROOT / "docs" / "how-to" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", runbook, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    tested = (ROOT / "tests" / "gateway" / "alerts.test.yml").read_text(encoding="utf-8")
    for rule in ALERTS:
        name, notes = rule["alert"], rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}, name
        assert notes["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
        assert len(notes["description"]) > 40, name
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert name in tested, name
        for words in re.findall(r"\((lisa [a-z]+ ?[a-z]*)", notes["description"]):
            _, *path = words.split()
            assert CliRunner().invoke(main, [*path, "--help"]).exit_code == 0, words
        used = set(re.findall(r"\$labels\.(\w+)", str(notes)))
        assert used <= labels_in(rule["expr"]) | {"instance", "job"}, name


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH (Debian: prometheus)")
@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("check rules", RULES),
        ("check config", CONFIGS / "prometheus.yml"),
        pytest.param(
            "test rules", ROOT / "tests" / "gateway" / "alerts.test.yml", marks=pytest.mark.full
        ),
    ],
)
def test_promtool(command: str, path: Path, tmp_path: Path) -> None:
    run(str(PROMTOOL), *command.split(), path, cwd=tmp_path)


SECONDS = "lisa_consumer_handler_seconds"


def test_a_page_is_as_prometheus_wants_it() -> None:
    spread = Spread(FAMILIES[SECONDS].bounds)
    values = [random.expovariate(20) for _ in range(500)] + [0.001, 0.0025, 5000.0]
    for value in values:
        spread.observe(value)
    labels = {"topic": 'a"b\\c\nd{},=', "group": "g"}
    numbers: Numbers = {SECONDS: {tuple(labels.values()): spread.numbers()}}
    page = Exposed(metrics_page("consumer", [numbers]).body.decode())
    for bound in (*FAMILIES[SECONDS].bounds, math.inf):
        le = "+Inf" if bound == math.inf else str(bound)
        below = sum(value <= bound for value in values)
        assert page.value(f"{SECONDS}_bucket", **labels, le=le) == below
    assert page.value(f"{SECONDS}_count", **labels) == len(values)
    assert page.value(f"{SECONDS}_sum", **labels) == pytest.approx(sum(values))
    assert page.value("lisa_build_info", role="consumer", version=lisa.__version__) == 1


def test_a_fault_of_a_gateway_counts_as_500_and_not_as_a_client_that_left() -> None:
    settings = GatewayServerSettings()
    context = Mock(meter=Meter(), shares=Shares(settings, None))
    context.settings.gateway_server = settings
    context.token.return_value, context.access.is_open = EVERYTHING, False
    broken, send = AsyncMock(side_effect=ZeroDivisionError), AsyncMock()
    receive = AsyncMock(return_value={"type": "http.request", "body": b""})
    scope = {"type": "http", "method": "GET", "path": "/v1/topics", "headers": []}
    asyncio.run(LimitsMiddleware(broken, context)(scope, receive, send))
    answer = send.await_args_list[0].args[0]
    assert answer["status"] == 500
    assert (b"x-frame-options", b"DENY") in answer["headers"]
    assert context.meter.numbers()["lisa_gateway_requests_total"] == {("native", "GET", "500"): 1}
    assert context.shares.requests.total == context.shares.buffered.total == 0
