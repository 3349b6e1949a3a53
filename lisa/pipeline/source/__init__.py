"""The Spark data source `lisa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the data source `lisa` with a Spark session. Idempotent.

    Sets `spark.sql.python.filterPushdown.enabled`, without which Spark refuses to read with a
    Python data source that implements pushFilters. No other setting of the session changes.
    """
    from lisa.pipeline.source.source import LisaDataSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(LisaDataSource)
