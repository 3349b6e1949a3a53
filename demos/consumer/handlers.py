"""A handler that prints each message."""

from lisa import Message, message_received


@message_received.connect_via("mystream")
def show(topic: str, *, message: Message) -> None:
    """Handle one message: returning acks it."""
    print(f"{topic}: {message.body!r}, due {message.due:%H:%M:%S}", flush=True)
