"""One Spark session for the whole suite, because starting one takes longer than most tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from lisa.cli.main import main
from lisa.pipeline import spark_session
from tests.databases import JARS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores that writes only below the suite's directory."""
    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        app="tests",
        master="local[2]",
        settings={
            "spark.jars": ",".join(str(jar) for jar in JARS.values() if jar.exists()),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        },
    )
    yield session
    session.stop()


@pytest.fixture
def pipeline(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `lisa pipeline` with some words on the suite's session.

    A program of its own takes ten seconds to start; one test of each job runs one.
    """
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return lambda *words: CliRunner().invoke(main, ["pipeline", *words])


IN_MAKE_TEST = (
    "test_archive_job.py::test_once_archives_everything_and_a_second_run_nothing",
    "test_cluster.py::test_a_master_that_does_not_answer",
    "test_cluster.py::test_an_environment",
    "test_cluster.py::test_only_local_masters",
    "test_audit.py::TestAgainstTheServer::test_a_message_lost_without_an_end_is_missing",
    "test_journal_stream.py::TestGaps::test_all_trimmed",
    "test_journal_stream.py::test_a_run_continues_after_the_previous_one",
    "test_journal_stream.py::test_every_column_of_an_event",
    "test_report.py::test_attempts_and_reasons",
    "test_report.py::test_counts_by_topic_and_hour",
    "test_restore.py::TestAfterFlushAll::",
    "test_schedule.py::test_every_type_of_body",
    "test_schedule.py::test_ids_ttls_headers_and_policies",
    "test_schedule.py::test_refused_rows_do_not_fail_the_job",
    "test_schedule.py::test_repeating_a_job_adds_nothing",
    "test_search.py::TestArchiveAndQueue::test_the_queue_wins_if_both_have_the_same_life",
    "test_search.py::TestConditions::test_by_id_topic_state_and_due",
    "test_shards.py::test_rows_are_sent_to_all_shards_and_read_as_one_topic",
    "test_snapshot.py::test_rows_of_every_state",
)
"""At least one test of each job; Spark is slow, so the others belong to `make test-all`."""


SAME_ON_BOTH = (
    "test_a_streaming_query_can_use_the_writer",
    "test_archive_audit_search_and_restore_across_shard_changes",
    "test_archives_with_different_prefixes_are_independent",
    "test_batches_of_any_size_yield_the_same_archive",
    "test_gaps_are_recorded_once",
    "test_killed_between_steps_then_written_again",
    "test_a_database_killed_during_a_batch_recovers",
)
"""Tests of what does not depend on the database's dialect."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most tests for `make test-all`, and repeats on the second database for `test-slow`."""
    for item in items:
        if not item.nodeid.startswith("tests/spark/"):
            continue
        if "mariadb" in item.name and item.name.startswith(SAME_ON_BOTH):
            item.add_marker(pytest.mark.slow)
        if not item.nodeid.removeprefix("tests/spark/").startswith(IN_MAKE_TEST):
            item.add_marker(pytest.mark.full)
