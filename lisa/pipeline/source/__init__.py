"""The Spark data source `lisa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Let a session know the format `lisa`; safe to repeat."""
    from lisa.pipeline.source.source import LisaDataSource

    # Without it Spark refuses a source in Python that knows filters, even where there are none.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(LisaDataSource)
