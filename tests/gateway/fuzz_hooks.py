"""Hooks for schemathesis: requests that do not wait, and that refer to existing messages.

Random topics, ids and receipts alone would not reach code that needs an existing message.
"""

import json
import os
import urllib.request
import zlib
from typing import Any
from urllib.parse import quote

import schemathesis

LONGEST_WAIT_MS = 20
TOPIC = "fuzz"
HELD = os.environ["FUZZ_HELD"]
"""The topic for receipts; no other case changes its options or groups."""

IDS = ("fuzzed", "a/b", "ä", "a b", "fire", "100%", "..a")
SETTLING = ("/ack", "/retry", "/defer", "/extend", "/release")
BATCHES = (":batch-ack", ":batch-retry", ":batch-defer", ":batch-extend", ":batch-release")


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Replace the topic, id or receipt of every other case by an existing one."""
    path, body = case.path_parameters, case.body
    chosen = zlib.crc32(repr((path, body)).encode("utf-8", "replace"))
    if isinstance(body, dict) and isinstance(body.get("wait_ms"), (int, str)):
        wait_ms = body["wait_ms"]
        body["wait_ms"] = min(wait_ms, LONGEST_WAIT_MS) if isinstance(wait_ms, int) else "20ms"
    if not isinstance(path, dict):
        return
    if path.get("topic") == HELD:  # a case derived from one with a receipt
        path["topic"] = TOPIC
    if not chosen % 2:
        return
    if "topic" in path:
        path["topic"] = TOPIC
    if "id" in path:
        path["id"] = quote(IDS[chosen % len(IDS)], safe="")
    if case.operation.path.endswith(SETTLING) and isinstance(body, dict):
        held = _delivery(case.operation.base_url or case.operation.schema.get_base_url())
        path |= {"topic": HELD, "id": held["id"]}
        body["receipt"] = held["receipt"]
    if case.operation.path.endswith(BATCHES) and isinstance(body, dict):
        deliveries = body.get("deliveries")
        if isinstance(deliveries, list) and deliveries and isinstance(deliveries[0], dict):
            held = _delivery(case.operation.base_url or case.operation.schema.get_base_url())
            path["topic"], deliveries[0]["receipt"] = HELD, held["receipt"]


def _delivery(base_url: str) -> dict[str, str]:
    topic = f"{base_url.rstrip('/')}/v1/topics/{HELD}"
    _post(f"{topic}/groups", {"group": "lisa"})  # else the test waits for the manager to declare it
    _post(f"{topic}/messages", {"body": "for a receipt"})
    found = _post(f"{topic}/pull", {"wait_ms": 30_000})["deliveries"]
    held: dict[str, str] = found[0]
    return held


def _post(url: str, content: Any) -> Any:
    request = urllib.request.Request(  # noqa: S310  the gateway under test
        url, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=40) as answer:  # noqa: S310  as above
        return json.load(answer)
