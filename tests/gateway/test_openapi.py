"""The OpenAPI document is complete and matches the code; its page is safe and accessible."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from lisa.cli.messages import reschedule
from lisa.cli.send import send
from lisa.gateway.api import OPERATIONS
from lisa.gateway.api.description import COMMON
from lisa.producer import DueOptions, Outgoing, SendOptions, option_texts
from tests.gateways import Gateway, new_topic
from tests.generators import generator
from tests.servers import ROOT


@pytest.fixture
def document(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/v1/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    shown = {
        (method.upper(), path): one
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }
    table = {(one.method, one.path): one for one in OPERATIONS}
    assert shown.keys() == table.keys()
    assert len({one["operationId"] for one in shown.values()}) == len(shown)
    for key, one in table.items():
        said = shown[key]
        assert said["summary"]
        statuses = {str(status) for status in {**one.answers, **COMMON, **one.problems}}
        assert said["responses"].keys() == statuses
        named = {each["name"] for each in said["parameters"] if each["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", one.path))
        if one.scope:
            assert f"`{one.scope}`" in said["description"]


def test_every_operation_has_a_current_example(document: dict[str, Any]) -> None:
    examples = generator("generate_examples")
    written = examples.RECORD.read_text(encoding="utf-8")
    assert written == examples.recorded(), "run: python docs/generate_examples.py"
    record = json.loads(written)
    assert examples.PAGE.read_text(encoding="utf-8") == examples.render(record)
    assert record.keys() == {one.name for one in OPERATIONS}
    for one in OPERATIONS:
        said = document["paths"][one.path][one.method.lower()]
        assert (
            "example" in said.get("requestBody", {}).get("content", {}).get("application/json", {})
        ) is (one.body is not None)
        answers = [each["content"] for each in said["responses"].values()]
        shown = [kind for each in answers for kind in each.values() if "example" in kind]
        assert len(shown) == (one.media_type == "application/json")


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    wanted = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert wanted == schemas.keys()


def test_requests_are_strict_and_bounded(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in (one for one in schemas if one.endswith("Request")):
        assert schemas[name]["additionalProperties"] is False, name
    assert schemas["BatchRequest"]["properties"]["messages"]["maxItems"] == 1_000
    wait = schemas["PullRequest"]["properties"]["wait_ms"]
    whole, text = wait["anyOf"]
    assert (whole["minimum"], whole["maximum"]) == (0, 60_000)
    assert text == {**text, "type": "string", "maxLength": 64}
    # A body that is null is a body.
    assert "type" not in schemas["SendRequest"]["properties"]["body"]


def test_the_typescript_types_are_current() -> None:
    types = generator("generate_types", ROOT / "clients")
    assert types.TYPES.read_text(encoding="utf-8") == types.render(), "run: make reference"


class Page(HTMLParser):
    """The tags and attributes of a page, the resources that it fetches, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes |= found.keys()
        self.ids += [found["id"]] if "id" in found else []
        if tag == "a":
            self.links.append(found["href"])
        elif "href" in found or "src" in found:
            self.fetched.append(found.get("href") or found["src"])


def test_the_page_is_self_contained_and_its_links_resolve(client: httpx.Client) -> None:
    answer = client.get("/v1/docs")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self';")
    assert "unsafe" not in policy
    page = Page(answer.text)
    assert page.fetched == ["docs.css"]
    assert client.get("/v1/docs.css").headers["content-type"].startswith("text/css")
    assert not page.tags & {"script", "style", "iframe", "img"}
    assert not [one for one in page.attributes if one.startswith("on") or one == "style"]
    assert len(set(page.ids)) == len(page.ids)
    inside = {f"#{one}" for one in page.ids}
    assert not [one for one in page.links if one.startswith("#") and one not in inside]
    for one in OPERATIONS:
        assert f'id="{one.name}"' in answer.text
        assert one.path in answer.text


def test_the_reference_page_lists_every_operation_and_problem() -> None:
    page = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    row = re.compile(r"^\| ([A-Z]+) \| `?([^`|]+)`? \| .*? \| (\w+) \|$", re.MULTILINE)
    rows = {(method, path): scope for method, path, scope in row.findall(page)}
    for one in OPERATIONS:
        path = one.path.removeprefix("/v1/topics")
        if path.startswith("/v1"):
            assert f"`{one.method} {path}`" in page
        else:
            assert rows.pop((one.method, path or "(itself)")) == one.scope
    assert not rows
    gateway = ROOT / "lisa" / "gateway"
    files = [
        gateway / "problems.py",
        gateway / "limits.py",
        *gateway.glob("api/**/*.py"),
    ]
    raised = {
        kind
        for file in files
        for kind in re.findall(r"\b(?:4\d\d|503), \"([a-z-]+)\"", file.read_text())
    }
    for kind in raised - {"http"}:
        assert f"`{kind}`" in page, kind


# Requests generated from the document -------------------------------------------------------------


CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
CHECKS += ",response_schema_conformance,response_headers_conformance"
CHECKS += ",unsupported_method,allow_header_conformance"
OPTIONS = {
    "exclude-path": "/v1/topics/{topic}/events",  # an endless response
    "checks": CHECKS,
    "phases": "examples,coverage,fuzzing,stateful",
    "max-examples": "12",
    "seed": "5",
    "suppress-health-check": "all",
    "request-timeout": "10",
}
FEWEST_CASES = 1_000


@pytest.mark.full
def test_no_request_causes_a_server_error(gateway: Gateway, tmp_path: Path) -> None:
    held = new_topic("held")
    # A separate process: its warnings are not errors, and its pytest plugin is not needed.
    program = str(Path(sys.executable).with_name("schemathesis"))
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += ["--no-shrink", "--continue-on-failure"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.gateway.fuzz_hooks", "FUZZ_HELD": held}
    done = subprocess.run(
        [program, "run", f"{gateway.url}/v1/openapi.json", *options],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        env={**os.environ, **hooks, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) >= FEWEST_CASES
    assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]
    # Some cases had real receipts.
    counters = gateway.client.get(f"/v1/topics/{held}").json()["counters"]
    assert counters["acked"] > 0
    assert counters["retried"] + counters["garbage"] > 0


# The options of a send ----------------------------------------------------------------------------


def test_every_option_of_a_send_has_its_place() -> None:
    """SendOptions declares the options; a request's fields follow from it."""
    options, due = set(SendOptions.__annotations__), set(DueOptions.__annotations__)
    assert set(option_texts(SendOptions)) == options
    assert set(Outgoing.__struct_fields__) == (options - {"on_duplicate"}) | {"body", "id"}
    assert options - {one.name or "" for one in send.params} == set()
    assert due - {one.name or "" for one in reschedule.params} == set()


def test_the_go_client_sends_only_fields_of_requests(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    source = "".join(path.read_text() for path in (ROOT / "clients" / "go").glob("*.go"))
    for struct, schema in (("sendRequest", "SendRequest"), ("LocalTime", "RescheduleRequest")):
        (body,) = re.findall(rf"type {struct} struct {{(.*?)\n}}", source, re.DOTALL)
        fields = set(re.findall(r'json:"(\w+)', body))
        assert fields <= schemas[schema]["properties"].keys()
