"""Requests made up from the API's own description: no answer is a 500, or one that it denies."""

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
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "response_headers_conformance", "unsupported_method",
    "allow_header_conformance",
)  # fmt: skip
FEWEST_CASES = 1_000


def test_no_request_is_a_fault(gateway: Gateway, tmp_path: Path) -> None:
    held = new_topic("held")
    # A process of its own: its warnings are no errors, and its plugin for pytest is not needed.
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run",
            f"{gateway.url}/v1/openapi.json",
            # An endless answer.
            "--exclude-path", "/v1/topics/{topic}/events",
            "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing,stateful",
            "--max-examples", "12", "--seed", "5", "--no-shrink", "--continue-on-failure",
            "--suppress-health-check", "all", "--request-timeout", "10",
        ],
        check=False, capture_output=True, text=True, cwd=tmp_path, timeout=240,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.gateway.fuzz_hooks",
             "PYTHONPATH": str(ROOT), "FUZZ_HELD": held},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) >= FEWEST_CASES
    assert not [line for line in gateway.said if "ERROR" in line or "Traceback" in line]
    # The receipts among the cases were real ones.
    counters = gateway.client.get(f"/v1/topics/{held}").json()["counters"]
    assert counters["acked"] > 0
    assert counters["retried"] + counters["garbage"] > 0
