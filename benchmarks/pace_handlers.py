"""The consumer of `pace.py`: notes how late each message is, and writes all when it has them."""

import os
import time
from pathlib import Path

from lisa import Consumer, Message

RESULT = Path(os.environ["LISA_PACE_RESULT"])
EXPECTED = int(os.environ["LISA_PACE_EXPECTED"])

consumer = Consumer(os.environ["LISA_REDIS_URL"])
lateness_us: list[int] = []


@consumer.on("pace")
def note(message: Message) -> None:
    """Handle one message."""
    lateness_us.append(time.time_ns() // 1000 - message.due_ms * 1000)
    if len(lateness_us) == EXPECTED:
        text = "\n".join([str(time.time()), *map(str, lateness_us)])
        RESULT.with_suffix(".part").write_text(text)
        RESULT.with_suffix(".part").rename(RESULT)
