"""An archive of one topic's journal during the run, and the restore after the server lost data."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from lisa.core.model.envelope import decode_content
from tests.torture.reading import ARCHIVED

if TYPE_CHECKING:
    from pathlib import Path

    from tests.torture.stage import Stage

TOPIC = "bulk"
INTERVAL = "2s"
LOSES_S = 20.0
"""How much the server loses, far more than its setting allows: archiving takes seconds."""

SPARK = ["--master", "local[1]", "--spark-conf", "spark.sql.shuffle.partitions=1"]
WITHIN_S = 600.0  # a JVM of its own, on a busy machine


def archive_command(url: str, out: Path) -> list[str]:
    """The command that archives the topic's journal as Parquet until SIGTERM."""
    return [
        "-m",
        "lisa.cli.main",
        "pipeline",
        "archive",
        "--to",
        str(out / "archive"),
        "--topic",
        TOPIC,
        "--interval",
        INTERVAL,
        "--on-gap",
        "record",
        "--redis",
        url,
        *SPARK,
    ]


def has_begun(archive: Path) -> bool:
    """Whether anything is archived yet: a JVM starts slowly."""
    return any(archive.glob("message_log/**/*.parquet"))


def restore(stage: Stage) -> None:
    """Restore what the archive has and the server lacks; note the result."""
    command = [
        sys.executable,
        "-m",
        "lisa.cli.main",
        "pipeline",
        "restore",
        "--archive",
        str(stage.out / "archive"),
        "--topic",
        TOPIC,
        "--report",
        str(stage.out / "restored"),
        "--redis",
        stage.server.url,
        "--json",
        *SPARK,
    ]
    with (stage.out / "logs" / "restore.log").open("wb") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, timeout=WITHIN_S, check=False
        )
    (stage.out / "restored.json").write_bytes(done.stdout)
    counts = json.loads(done.stdout)["counts"] if done.returncode == 0 else {}
    stage.note(
        "end",
        role="restore",
        number=0,
        how="told to",
        code=done.returncode,
        age_s=WITHIN_S,
        counts=counts,
    )
    numbers = archived(stage.out / "archive")
    (stage.out / ARCHIVED).write_text(json.dumps(numbers), encoding="utf-8")


def archived(archive: Path) -> list[int]:
    """The numbers of the messages whose sends are archived."""
    import pyarrow.dataset as ds

    if not has_begun(archive):
        return []
    log = ds.dataset(archive / "message_log", format="parquet", partitioning="hive")
    rows = log.to_table(["envelope"], filter=ds.field("state") == "sent")
    return [int(decode_content(data)[0][0]) for data in rows["envelope"].to_pylist()]
