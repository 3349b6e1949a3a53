"""Requests generated from the OpenAPI document: no response is a 500 or violates the document."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gateways import new_topic
from tests.servers import ROOT

if TYPE_CHECKING:
    from tests.gateways import Gateway

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
FEWEST_CASES = 1_000


def test_no_request_causes_a_server_error(gateway: Gateway, tmp_path: Path) -> None:
    held = new_topic("held")
    # A separate process: its warnings are not errors, and its pytest plugin is not needed.
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{gateway.url}/v1/openapi.json",
            # An endless response.
            "--exclude-path",
            "/v1/topics/{topic}/events",
            "--checks",
            ",".join(CHECKS),
            "--phases",
            "examples,coverage,fuzzing,stateful",
            "--max-examples",
            "12",
            "--seed",
            "5",
            "--no-shrink",
            "--continue-on-failure",
            "--suppress-health-check",
            "all",
            "--request-timeout",
            "10",
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "tests.gateway.fuzz_hooks",
            "PYTHONPATH": str(ROOT),
            "FUZZ_HELD": held,
        },
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
