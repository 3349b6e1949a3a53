"""The gateway's scenario: an HTTP client that repeats requests until they succeed."""

from __future__ import annotations

from typing import Any

import httpx

from lisa.embedded.server import free_port
from tests.faults.kill_lives import Life

LATER_MS = 600_000
FIRST = {"b-0": "extend", "b-1": "retry", "b-2": "discard", "b-3": "release", "purged": "discard"}
"""What is done with the first delivery of a message; the others are acked."""
MORE: dict[str, dict[str, Any]] = {"retry": {"delay_ms": 20}, "discard": {"discard": True}}


class GatewayLife(Life):
    """Every operation that changes something, each repeated until there is a response."""

    role = "gateway"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.port = free_port()
        self._root = f"http://127.0.0.1:{self.port}"
        self._client = httpx.Client(base_url=f"{self._root}/v1/", timeout=5)
        self._done: set[str] = set()

    def order(self) -> dict[str, Any]:
        return {"port": self.port}

    def prepare(self) -> None:
        """Nothing to do: the requests create the topic."""
        self.ends(["a", *[f"b-{n}" for n in range(5)], "moved", "fired"], "acked")
        self.ends(["taken-back"], "cancelled")
        self.ends(["purged"], "purged")

    def turn(self) -> None:
        self.promote()

    def close(self) -> None:
        self._client.close()
        super().close()

    def ask(self, method: str, path: str, *fine: int, **json: Any) -> httpx.Response:
        """One request, repeated until there is a response; 2xx is always accepted."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            try:
                answers.append(self._client.request(method, path, json=json or None))
            except httpx.TransportError:
                return False
            return answers[-1].status_code != 503

        self.until(answered)
        found = answers[-1]
        assert found.is_success or found.status_code in fine, f"{method} {path}: {found.text}"
        return found

    def live(self) -> None:
        self.ask("POST", "topics/orders/groups", group="other")
        self.ask("PATCH", "topics/orders/options", max_ready=9_000, journal=True)
        self._send()
        self.ask("DELETE", "topics/orders/groups/other", 404)
        self.ask("POST", "topics/orders/pause")
        self.ask("POST", "topics/orders/resume")
        self._take()
        self.ask("GET", "topics/orders")
        self.ask("GET", "topics")
        self.ask("GET", f"{self._root}/topics/orders/messages/a")  # its history, from the journal

    def _send(self) -> None:
        send, later = "topics/orders/messages", LATER_MS
        self.ask("POST", send, body=1, id="a", delay_ms=50)
        self.ask("POST", f"{send}:batch", messages=[{"body": n, "id": f"b-{n}"} for n in range(5)])
        for one in ("taken-back", "moved", "fired"):
            self.ask("POST", send, body=1, id=one, delay_ms=later)
        self.ask("DELETE", f"{send}/taken-back")
        self.ask("PATCH", f"{send}/moved", 409, delay_ms=50)
        self.ask("POST", f"{send}/fired/fire", 409)
        self.ask("POST", send, body=1, id="purged")
        self.ask("GET", f"{send}/a")
        self.ask("GET", f"{send}?state=waiting")

    def _take(self) -> None:
        given_up = ("purged", "b-2")
        self.until(lambda: self._has_taken_all() and set(self.cast.states(given_up)) == {"garbage"})
        self.ask("GET", "topics/orders/garbage")
        self.ask("POST", "topics/orders/garbage:purge", ids=["purged"])
        self.ask("POST", "topics/orders/garbage:requeue", ids=["b-2"])
        self.until(lambda: self._has_taken_all() and self.are_all_at_an_end())

    def _has_taken_all(self) -> bool:
        """Pull once and settle the deliveries; true if there were none."""
        pulled = self.ask("POST", "topics/orders/pull", group="g", max=3, wait_ms=200)
        deliveries = pulled.json()["deliveries"]
        for one in deliveries:
            self._settle(one)
        return not deliveries

    def _settle(self, one: dict[str, Any]) -> None:
        """Settle a delivery as planned; if it is too late, the plan applies to the next one."""
        message_id = one["id"]
        self.note_delivery(message_id, one["attempt"], one["due_ms"])
        verb = FIRST.get(message_id, "ack")
        if message_id in self._done:
            verb = "ack"
        if self._say(one, verb):
            self._done.add(message_id)
            if verb == "extend":
                self._say(one, "ack")

    def _say(self, one: dict[str, Any], verb: str) -> bool:
        """Settle a delivery; true if it was still leased."""
        more = MORE.get(verb, {})
        path = f"topics/orders/messages/{one['id']}/" + ("retry" if verb == "discard" else verb)
        return self.ask("POST", path, 409, receipt=one["receipt"], **more).is_success
