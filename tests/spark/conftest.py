"""One Spark session for the suite: starting one costs more than most tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lisa.pipeline import spark_session
from tests.databases import JARS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores, everything it writes below the suite's own directory."""
    place = tmp_path_factory.mktemp("spark")
    session = spark_session(
        app="tests",
        master="local[2]",
        settings={
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.jars": ",".join(str(jar) for jar in JARS.values() if jar.exists()),
            "spark.local.dir": str(place / "local"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(place / "warehouse"),
        },
    )
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is killed on one database in every run is killed on the other by `make test-slow`."""
    for item in items:
        if "killed" in item.name and "mariadb" in item.name:
            item.add_marker(pytest.mark.slow)
