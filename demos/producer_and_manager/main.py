"""One process sends three messages, half a second apart, and promotes them."""

import time
from datetime import timedelta
from pathlib import Path

from lisa import Manager, Producer

config = Path(__file__).with_name("both.yml")

with Manager.from_config(config), Producer.from_config(config) as producer:
    ids = [
        producer.send("mystream", f"message {number}", delay=timedelta(seconds=number / 2))
        for number in (1, 2, 3)
    ]
    for message_id in ids:
        while (found := producer.get("mystream", message_id)) and found.state == "waiting":
            time.sleep(0.05)
        print(message_id, found.state if found else "gone", flush=True)
