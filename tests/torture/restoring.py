"""An archive of one topic's journal beside the run, and what restores a server that forgot."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from lisa.core.envelope import decode_content

if TYPE_CHECKING:
    from pathlib import Path

    from tests.torture.stage import Stage

__all__ = [
    "ARCHIVED",
    "LOSES_S",
    "TOPIC",
    "WITHIN_S",
    "archive_command",
    "archived",
    "has_begun",
    "restore",
]

TOPIC = "bulk"
ARCHIVED = "archived.json"
INTERVAL = "2s"
LOSES_S = 20.0
"""So much the server forgets then, far more than its setting allows: an archive takes seconds."""

SPARK = ["--master", "local[1]", "--spark-conf", "spark.sql.shuffle.partitions=1"]
WITHIN_S = 600.0  # a JVM of its own, on a machine with other work


def archive_command(url: str, out: Path) -> list[str]:
    """What keeps the topic's journal as Parquet, until it is told to end."""
    return [
        "-m", "lisa.cli.main", "pipeline", "archive", "--to", str(out / "archive"),
        "--topic", TOPIC, "--interval", INTERVAL, "--on-gap", "record", "--redis", url, *SPARK,
    ]  # fmt: skip


def has_begun(archive: Path) -> bool:
    """Whether anything was archived yet: a JVM takes its time to start."""
    return any(archive.glob("message_log/**/*.parquet"))


def restore(stage: Stage) -> None:
    """Put back what the archive has and the server has not; note how that ended."""
    command = [
        sys.executable, "-m", "lisa.cli.main", "pipeline", "restore",
        "--archive", str(stage.out / "archive"), "--topic", TOPIC,
        "--report", str(stage.out / "restored"), "--redis", stage.server.url, "--json", *SPARK,
    ]  # fmt: skip
    with (stage.out / "logs" / "restore.log").open("wb") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, timeout=WITHIN_S, check=False
        )
    (stage.out / "restored.json").write_bytes(done.stdout)
    counts = json.loads(done.stdout)["counts"] if done.returncode == 0 else {}
    stage.note("end", role="restore", number=0, how="told to", code=done.returncode, age_s=WITHIN_S,
               counts=counts)  # fmt: skip
    numbers = archived(stage.out / "archive")
    (stage.out / ARCHIVED).write_text(json.dumps(numbers), encoding="utf-8")


def archived(archive: Path) -> list[int]:
    """The numbers of the messages whose sending the archive has."""
    import pyarrow.dataset as ds

    if not has_begun(archive):
        return []
    log = ds.dataset(archive / "message_log", format="parquet", partitioning="hive")
    rows = log.to_table(["envelope"], filter=ds.field("state") == "sent")
    return [int(decode_content(data)[0][0]) for data in rows["envelope"].to_pylist()]
