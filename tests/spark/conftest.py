"""One Spark session for the whole suite, because starting one takes longer than most tests."""

import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from click.testing import Result
from pyspark.sql import SparkSession

from lisa.pipeline import spark_session
from tests.databases import JARS
from tests.spark.jobs import Jobs, run_command


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores that writes only below the suite's directory."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        pytest.skip("the user of this process has no name, which Spark needs")
    folder = tmp_path_factory.mktemp("spark")
    session = spark_session(
        app="tests",
        master="local[2,2]",  # a failed task is repeated once
        settings={
            "spark.jars": ",".join(str(jar) for jar in JARS.values() if jar.exists()),
            "spark.local.dir": str(folder / "local"),
            "spark.python.daemon.module": "tests.spark.worker_daemon",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        },
    )
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def unchanged_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """No job leaves a setting of the caller's session changed, except the driver of a database."""

    def settings() -> dict[str, str]:
        found = request.getfixturevalue("spark").conf.getAll if has_session else {}
        return {name: value for name, value in found.items() if name != "spark.jars"}

    has_session = "spark" in request.fixturenames
    before = settings()
    yield
    assert settings() == before


@pytest.fixture
def pipeline(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs commands on the suite's session, which they do not stop."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return run_command


@pytest.fixture
def jobs(
    spark: SparkSession,
    pipeline: Callable[..., Result],
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
) -> Iterator[Jobs]:
    """Runs jobs and commands on the suite's session."""
    with ExitStack() as closing:
        yield Jobs(spark, pipeline, redis_url, client, tmp_path, closing)


IN_MAKE_TEST = (
    "test_archive_job.py::test_a_query_whose_python_was_slow_to_start",
    "test_archive_job.py::test_an_idle_archive",
    "test_archive_job.py::test_once_archives_everything_and_a_second_run_nothing",
    "test_audit.py::test_a_message_lost_without_an_end_is_missing",
    "test_journal_stream.py::test_a_run_continues_after_the_previous_one",
    "test_journal_stream.py::test_every_column_of_an_event",
    "test_report.py::test_attempts_and_reasons",
    "test_report.py::test_counts_by_topic_and_hour",
    "test_report.py::test_formatting",
    "test_report.py::test_hours_start",
    "test_report.py::test_steps_are",
    "test_report.py::test_the_forecast_finds",
    "test_restore.py::test_after_a_flush",
    "test_schedule.py::test_due_times_and_delays",
    "test_schedule.py::test_every_type_of_body",
    "test_schedule.py::test_ids_ttls_headers_and_policies",
    "test_schedule.py::test_refused_rows_do_not_fail_the_job",
    "test_schedule.py::test_repeating_a_job_adds_nothing",
    "test_schedule.py::test_wrong_columns_are_named",
    "test_schedule_cli.py::test_csv_columns_are_mapped",
    "test_search.py::test_the_queue_wins_if_both_have_the_same_life",
    "test_session.py::test_a_cluster_that_cannot_run_lisa",
    "test_session.py::test_settings_of_local_masters",
    "test_session.py::test_the_choice_of_java",
    "test_shards.py::test_rows_are_sent_to_all_shards_and_read_as_one_topic",
    "test_snapshot.py::test_rows_of_every_state",
)
"""At least one test of each job; Spark is slow, so the others belong to `make test-all`."""


SLOW = (
    "test_archive_files.py::test_a_year_of_a_hundred_topics",
    "test_archive_files.py::test_an_end_archived_after_the_next_life",
    "test_archive_files.py::test_files_have_bloom_filters",
    "test_archive_jdbc.py::test_a_database_killed_during_a_batch_recovers",
    "test_archive_jdbc.py::test_each_prefix_has_one_writer",
    "test_archive_jdbc.py::test_gaps_are_recorded_once",
    "test_archive_job.py::test_an_archive_without_its_checkpoint",
    "test_archive_removal.py::test_entries_that_another_archive",
    "test_archive_removal.py::test_retention_deletes",
    "test_audit.py::test_without_the_server",
    "test_journal_stream.py::test_events_written_during_a_run",
    "test_restore.py::test_messages_past_their_ttl",
    "test_restore.py::test_restore_under_traffic",
    "test_shards.py::TestStartPositions::test_an_archive_that_stopped",
)
"""Long variants of what the others show, for `make test-slow`."""


ONLY_ON_POSTGRESQL = (
    "test_a_database_killed_during_a_batch_recovers",
    "test_batches_of_any_size_yield_the_same_archive",
    "test_each_prefix_has_one_writer",
    "test_gaps_are_recorded_once",
    "test_killed_between_steps_then_written_again",
    "test_retention_and_erasure",
    "test_the_job_archives_the_traffic_of_real_roles",
)
"""On MariaDB, too, these are for `make test-slow`: the statements differ little."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most tests for `make test-all`, and repeats on the second database for `test-slow`."""
    for item in items:
        if not item.nodeid.startswith("tests/spark/"):
            continue
        name = item.nodeid.removeprefix("tests/spark/")
        if name.startswith(SLOW) or (
            "mariadb" in item.name and item.name.startswith(ONLY_ON_POSTGRESQL)
        ):
            item.add_marker(pytest.mark.slow)
        if not name.startswith(IN_MAKE_TEST):
            item.add_marker(pytest.mark.full)
