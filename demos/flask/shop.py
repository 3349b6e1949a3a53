"""A site of orders: an order is cancelled unless it is paid in time."""

from __future__ import annotations

from flask import Flask

from lisa import Producer

producer = Producer()  # threads share it; it connects at the first request, after any fork
app = Flask(__name__)


@app.post("/orders/<int:order>")
def place(order: int) -> dict[str, str]:
    """Place an order; a repeated request adds nothing."""
    sent = producer.send_one("orders", {"order": order}, id=f"order-{order}", delay="30m")
    return {"timeout": sent.outcome}


@app.post("/orders/<int:order>/payment")
def pay(order: int) -> dict[str, str]:
    """Pay: the timeout is cancelled, or has already begun."""
    return {"timeout": producer.cancel("orders", f"order-{order}")}
