"""Writes refused rows and their reasons to a file."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from lisa.pipeline.source import files
from lisa.pipeline.source.outcome import REASONS, TaskResult


class Refused:
    """Writes the refused rows of one task to a file of JSON lines `{topic, id, reason, row}`.

    The file name contains run and partition, so a repeated attempt of the task replaces the file.
    Without a directory, only the first reasons are kept, in the result.
    """

    def __init__(self, directory: str | None, name: str, result: TaskResult) -> None:
        self._path = files.join(directory, f"{name}.jsonl") if directory else None
        self._result = result
        self._stream: Any = None

    def add(
        self,
        batch: pa.RecordBatch | None,
        number: int,
        topic: str,
        message_id: str | None,
        reason: str,
    ) -> None:
        """Add one row of an Arrow batch; batch is None if the row itself is not available."""
        self._result.counts(topic).refused += 1
        if len(self._result.reasons) < REASONS:
            named = f"{topic} {message_id}".strip() if message_id else topic
            self._result.reasons.append(f"{named}: {reason}" if named else reason)
        if self._path is None:
            return
        if self._stream is None:
            self._stream = files.open_new(self._path)
            self._result.files.append(self._path)
        row = None
        if batch is not None:
            row = batch.slice(number, 1).to_pylist(maps_as_pydicts="lossy")[0]
        line = {"topic": topic, "id": message_id, "reason": reason, "row": row}
        self._stream.write(msgspec.json.encode(line, enc_hook=str) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
