"""The Spark session of Lisa's jobs: the caller's, spark-submit's, or a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lisa.pipeline.java import use_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Jobs on one machine are usually small; Spark's default of 200 partitions would slow them.
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Djava.net.preferIPv4Stack=true "
    f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}",
}
"""Default settings of a new session on one machine."""


def spark_session(
    *, app: str = "lisa", master: str = "local[*]", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The running Spark session or a new one, with the data source `lisa` registered.

    Under spark-submit, `master` is ignored, and the given configuration is kept; so is that of a
    running session in a notebook. Raises ConfigError if Java is missing.
    """
    under_submit = "PYSPARK_GATEWAY_PORT" in os.environ
    if not under_submit:
        use_java()
        # Bind Spark's web page and ports to this machine only.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if not under_submit and SparkSession.getActiveSession() is None:
        builder = builder.master(master)
        for name, value in LOCAL_SETTINGS.items():
            builder = builder.config(name, value)
    for name, value in (settings or {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    from lisa.pipeline.source import register

    register(spark)
    return spark
