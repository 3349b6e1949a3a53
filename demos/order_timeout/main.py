"""Cancel unpaid orders, with all three roles and the server in one program."""

import time
from datetime import timedelta

import msgspec

from lisa import Consumer, Manager, Message, Producer
from lisa.embedded import EmbeddedServer

TIME_TO_PAY = timedelta(seconds=2)


class OrderTimeout(msgspec.Struct):
    """The body of a message: the order that times out."""

    order: int


def main() -> None:
    """Create six orders, pay two of them, and print the results."""
    with EmbeddedServer() as server:
        consumer = Consumer(server.url)
        garbage: list[Message] = []

        @consumer.on("orders", model=OrderTimeout)
        def cancel_unpaid(message: Message) -> None:
            print(f"order {message.body.order}: not paid in time, cancelled", flush=True)

        @consumer.message_dead.connect
        def note(_topic: str, *, message: Message) -> None:
            garbage.append(message)

        with Manager(server.url), consumer, Producer(server.url) as producer:
            timeouts = {
                order: producer.send("orders", {"order": order}, delay=TIME_TO_PAY)
                for order in range(1, 6)
            }
            producer.send("orders", {"ordr": 6}, delay=TIME_TO_PAY)
            for order in (2, 4):
                print(f"order {order}: paid, time-out {producer.cancel('orders', timeouts[order])}")
            producer.reschedule("orders", timeouts[5], delay=2 * TIME_TO_PAY)
            print("order 5: asked for more time")
            time.sleep(2 * TIME_TO_PAY.total_seconds() + 0.5)
        for message in garbage:
            print(f"garbage: {message.body} ({message.reason})")


if __name__ == "__main__":
    main()
