"""Converts an archive in files from the layout of earlier versions to Delta tables, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.old_layout import OldArchive, is_old, remove
from lisa.pipeline.archive.reading import FileArchive, Tables
from lisa.pipeline.archive.writing import FileWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def convert(spark: SparkSession, where: str) -> int:
    """Convert an archive; returns its number of events, 0 if it was converted already.

    Copies the log, commits the copy, computes the messages from it, and deletes the old files.
    Until the commit, the old archive is unchanged; after a kill, run it again. The directory needs
    space for a second copy of the log. The job `archive` must not run meanwhile.

    Raises ConfigError if there is no archive.
    """
    folder = Folder(spark, where)
    if not is_old(folder):
        FileArchive(Tables(spark, folder))  # raises ConfigError if there is none
        return 0
    old = OldArchive(spark, folder)
    writer = FileWriter(spark, where, converting=True)
    count = writer.copy(old)
    writer.fold()
    writer.compact()
    remove(folder, old)
    return count
