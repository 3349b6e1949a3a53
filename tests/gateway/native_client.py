"""Calls of the native API."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx


def send(client: httpx.Client, topic: str, **message: Any) -> str:
    """Send a message; returns its id."""
    answer = client.post(f"/v1/topics/{topic}/messages", json={"body": 1} | message)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def pull(client: httpx.Client, topic: str, **wanted: Any) -> list[dict[str, Any]]:
    """Wait for up to five seconds by default; returns the deliveries."""
    answer = client.post(f"/v1/topics/{topic}/pull", json={"wait_ms": 5_000} | wanted)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["deliveries"]
    return found


def settle(
    client: httpx.Client, topic: str, delivery: dict[str, Any], verb: str, **more: Any
) -> httpx.Response:
    """Ack, retry, extend or release a delivery."""
    path = f"/v1/topics/{topic}/messages/{quote(delivery['id'], safe='')}/{verb}"
    return client.post(path, json={"receipt": delivery["receipt"]} | more)


def pages(client: httpx.Client, path: str, **query: Any) -> list[list[dict[str, Any]]]:
    """The messages on each page of a list."""
    found, cursor = [], None
    while True:
        asked = query | ({} if cursor is None else {"cursor": cursor})
        answer = client.get(path, params=asked)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["messages"])
        cursor = answer.json()["cursor"]
        if cursor is None:
            return found


def answer_in_turns(client: httpx.Client, method: str, path: str, **more: Any) -> httpx.Response:
    """The answer to a slow request, during which no other request waits for most of the time.

    Tries five times, because other processes may hold up either request.
    """
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            longest_s, began = 0.0, time.monotonic()
            asked = pool.submit(client.request, method, path, **more)
            while not asked.done():
                since = time.monotonic()
                assert client.get("/healthz").status_code == 200
                longest_s = max(longest_s, time.monotonic() - since)
            if longest_s < (time.monotonic() - began) / 2:
                return asked.result()
    raise AssertionError(f"another request waited for {longest_s:.3f} s")
