"""Log lines about one topic, or about one group of a topic."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class TopicLog(logging.LoggerAdapter[logging.Logger]):
    """Begins each line with the topic and group, and gives them to the record as attributes."""

    def __init__(self, log: logging.Logger, topic: str, group: str = "") -> None:
        super().__init__(log, {"topic": topic, "group": group} if group else {"topic": topic})
        self._where = f"topic {topic}, group {group}" if group else f"topic {topic}"

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """The complete line, with its attributes."""
        extra = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return f"{self._where}: {msg}", {**kwargs, "extra": extra}
