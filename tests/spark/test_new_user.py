"""Runs the README's section on Spark in an environment without Java, with the extra `java`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.wheels import build_both, environment, install

ROOT = Path(__file__).parent.parent.parent


def session() -> list[str]:
    """The commands of the README's section, without their comments."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("with Spark\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in block.splitlines()]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheels and the extra `java`, and without other Java."""
    folder = tmp_path_factory.mktemp("new-user")
    wheels = build_both(folder)
    found = environment(folder)
    install(found, wheels.client, f"{wheels.full}[java]")
    tools = folder / "tools"
    tools.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            tool = tools / program.name
            # Includes broken links, such as X11's in /usr/bin and /bin.
            if not program.name.startswith("java") and not tool.is_symlink():
                tool.symlink_to(program)
    return found


@pytest.mark.timeout(1_800)  # an installation of Spark, and six JVMs one after the other
def test_the_section_runs_as_written(binaries: Path, redis_url: str, tmp_path: Path) -> None:
    install, *commands = session()
    assert install == "pip install 'lisa-delay-queue[java]'"
    clean = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("PYTHON", "PYSPARK", "LISA_", "JAVA", "SPARK_CONF"))
    }
    tools = binaries.parent.parent / "tools"
    environment = {**clean, "PATH": f"{binaries}:{tools}", "LISA_REDIS_URL": redis_url}
    said: list[tuple[str, str]] = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        said.append((command, done.stdout))
    first, again = (text for command, text in said if "schedule" in command)
    assert re.search(r"orders\D+2\D+0\D+0\D+0", first)
    assert re.search(r"orders\D+0\D+2\D+0\D+0", again)
    (found,) = (text for command, text in said if "search" in command)
    assert found.count("waiting") == 1
    assert list((tmp_path / "report").glob("*.html"))
