"""An archive and a report in S3, by Hadoop's S3A, delta-rs and pyarrow, on a local server.

Needs `pip install 'moto[server]'`; for the archive, Spark downloads 670 MB of jars.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from pyarrow import fs

from lisa import Producer
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.gateway.page import search
from lisa.gateway.page.search import ArchiveQuery
from tests.servers import connect, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FOLDER = """
from lisa.pipeline import spark_session
from lisa.pipeline.archive.folder import Folder

spark = spark_session(app="test", master="local[1]", settings={settings!r})
folder = Folder(spark, "s3a://lisa/folder")
for number in range(2):
    folder.write("a/file", f"written {{number}}")
    folder.write("a/from", f"moved {{number}}")
    folder.rename("a/from", "b/to")
print(folder.read("a/file"), folder.read("b/to"), folder.names("a"), sep="|")
folder.delete("a")
folder.delete("nothing")
print(folder.files(""), folder.read("a/file"), folder.names("a"), sep="|")
"""


class Bucket:
    """A bucket named `lisa` on a server of its own."""

    def __init__(self, endpoint: str) -> None:
        self.settings = {
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.path.style.access": "true",
        }
        self.jars = {"spark.jars.packages": f"org.apache.hadoop:hadoop-aws:{hadoop_version()}"}
        self.env = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
        self._files = fs.S3FileSystem(
            access_key="key",
            secret_key="secret",
            region="us-east-1",
            endpoint_override=endpoint,
            allow_bucket_creation=True,
        )
        self._files.create_dir("lisa")

    def names(self, path: str) -> set[str]:
        """The files below a directory."""
        found = self._files.get_file_info(fs.FileSelector(f"lisa/{path}", recursive=True))
        return {one.path.removeprefix("lisa/") for one in found if one.type == fs.FileType.File}

    def commits(self, table: str) -> str:
        """Delta's log of a table, without its checkpoints."""
        found = []
        for name in self.names(f"{table}/_delta_log"):
            if name.endswith(".json"):
                with self._files.open_input_file(f"lisa/{name}") as file:
                    found.append(file.read().decode())
        return "".join(found)

    def run(self, *command: str, redis_url: str = "") -> str:
        """The output of a program with this bucket's credentials."""
        done = subprocess.run(
            [sys.executable, *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, **self.env, "LISA_REDIS_URL": redis_url},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def pipeline(self, redis_url: str, *words: str) -> str:
        """The output of a job."""
        settings = {**self.settings, **self.jars}.items()
        given = [f"--spark-conf={name}={value}" for name, value in settings]
        command = ["-m", "lisa.cli.main", "pipeline", *words, *given]
        return self.run(*command, redis_url=redis_url)


def hadoop_version() -> str:
    """The version of Hadoop that PySpark contains."""
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    return jar.stem.removeprefix("hadoop-client-api-")


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(port))
            yield Bucket(f"http://127.0.0.1:{port}")
        finally:
            server.terminate()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_files_are_replaced(bucket: Bucket) -> None:
    """As after a job that was killed before its commit, and does the same again."""
    said = bucket.run("-c", FOLDER.format(settings=bucket.settings))
    assert said.splitlines()[-2:] == [
        "written 1|moved 1|['file']",
        "[Stored(path='b/to', size=7)]|None|[]",
    ]


def test_an_archive_and_its_report(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, found = "s3a://lisa/archive", ("--archive", "s3a://lisa/archive")
    with EmbeddedServer() as server, Producer(server.url) as producer:
        with connect(server.url) as client:
            client.hset("lisa:{orders}:options", "journal", "1")
        producer.send("orders", "pay!", id="order-kept", delay="1h")
        producer.send("orders", "pay!", id="order-erased", delay="1h")
        producer.cancel("orders", "order-erased")
        said = bucket.pipeline(server.url, "archive", "--to", archive, "--once")
        assert "3 events archived" in said
        assert "order-erased" in bucket.commits("archive/message_log")
        bucket.pipeline(server.url, "erase", *found, "--id", "order-erased")
        assert "order-erased" not in bucket.commits("archive/message_log")
        rows = bucket.pipeline(server.url, "search", *found, "--topic", "orders", "--json")
        assert [one["id"] for one in json.loads(rows)["messages"]] == ["order-kept"]
        for name, value in bucket.env.items():
            monkeypatch.setenv(name, value)
        page = search.search_archive(
            "s3://lisa/archive", ArchiveQuery(wanted=""), sees=lambda _: True
        )
        assert [one.id for one in page.hits] == ["order-kept"]
        said = bucket.pipeline(server.url, "report", *found, "--to", "s3a://lisa/report", "--json")
        made = json.loads(said.splitlines()[-1])
        assert made["page"] == "s3a://lisa/report/report.html"
        assert {f"s3a://lisa/{name}" for name in bucket.names("report")} == {
            made["page"],
            *made["tables"],
        }
