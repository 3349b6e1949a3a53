"""Calls in camellia's wire format."""

from typing import Any

import httpx

from tests.gateways import new_topic
from tests.servers import connect, wait_until

QUEUE = "/camellia/delayQueue"
HEALTH = "/camellia/health"

Message = dict[str, Any]


class Queue:
    """One topic over one client; checks or returns the code of each response."""

    def __init__(self, client: httpx.Client, topic: str) -> None:
        self.client = client
        self.topic = topic

    def post(self, name: str, **form: object) -> dict[str, Any]:
        """One call; the body of its HTTP 200 response."""
        answer = self.client.post(f"{QUEUE}/{name}", data={"topic": self.topic, **form})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def send(self, msg: str = "text", delay_ms: int = 0, **form: object) -> Message:
        """Send a message; must succeed."""
        body = self.post("sendMsg", msg=msg, delayMillis=delay_ms, **form)
        assert (body["code"], body["msg"]) == (200, "success"), body
        message: Message = body["delayMsg"]
        return message

    def pull(self, **form: object) -> list[Message]:
        """Pull available messages."""
        body = self.post("pullMsg", **form)
        assert (body["code"], body["msg"]) == (200, None), body
        found: list[Message] = body["delayMsgList"]
        return found

    def poll(self, wait_ms: int = 10_000, **form: object) -> list[Message]:
        """Poll for messages up to the given time."""
        body = self.post("longPollingMsg", longPollingTimeoutMillis=wait_ms, **form)
        assert body.keys() == {"code", "delayMsgList"}, body
        found: list[Message] = body["delayMsgList"]
        return found

    def settle(self, message_id: str, *, ack: bool) -> int:
        """Ack or nack; returns the code."""
        code: int = self.post("ackMsg", msgId=message_id, ack=str(ack).lower())["code"]
        return code

    def delete(self, message_id: str) -> int:
        """Delete a message; returns the code."""
        code: int = self.post("deleteMsg", msgId=message_id)["code"]
        return code

    def get(self, message_id: str) -> Message | None:
        """The message in its present state."""
        body = self.post("getMsg", msgId=message_id)
        assert body["code"] == (404 if body["delayMsg"] is None else 200)
        message: Message | None = body["delayMsg"]
        return message

    def status(self, message_id: str) -> int | None:
        """Its status, 1 to 7."""
        found = self.get(message_id)
        return None if found is None else found["status"]

    def info(self) -> dict[str, Any]:
        """getTopicInfo."""
        body = self.client.get(f"{QUEUE}/getTopicInfo", params={"topic": self.topic}).json()
        data: dict[str, Any] = body["data"]
        return data


def shorten_ack_timeout(redis_url: str, topic: str) -> None:
    """Create a topic with a short ack timeout.

    A manager that has just started takes nothing back before one ack timeout has passed.
    """
    with connect(redis_url) as redis:
        redis.hset(f"lisa:{{{topic}}}:options", "ack_timeout", "2000")


def queue_with_group(client: httpx.Client, redis_url: str) -> Queue:
    """A new topic with a group declared by a manager and a short ack timeout."""
    queue = Queue(client, new_topic())
    shorten_ack_timeout(redis_url, queue.topic)
    queue.poll(wait_ms=1)
    with connect(redis_url) as redis:
        wait_until(lambda: redis.hlen(f"lisa:{{{queue.topic}}}:groups"))
    return queue
