"""Extracts the cause from Spark's exceptions, and says what to do about it.

Spark wraps an error raised by a task, a data source or a query in an exception whose text is a page
of tracebacks. Users only need the one line of Lisa's error, or of the last cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lisa.core.model import errors
from lisa.core.model.errors import LisaError

HOW_TO_SHIP = (
    "give executors this Python environment with --environment, or install it at the same path on "
    "all machines and name it with PYSPARK_PYTHON (how-to/pipeline-cluster.md)"
)

_MEMORY = (
    "raise spark.driver.memory, as with --spark-conf spark.driver.memory=4g, and on a cluster "
    "spark.executor.memory"
)

_CREDENTIALS = (
    "check the credentials of the object store, such as AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, and its address (how-to/pipeline-cluster.md)"
)

_CURES = {
    r"No module named|PYTHON_VERSION_MISMATCH|AttributeError: .*'lisa\.": HOW_TO_SHIP,
    r"Cannot run program": "name a Python that all machines have with PYSPARK_PYTHON",
    r"Python worker failed to connect back": "the machine was too busy to start a Python process "
    "within ten seconds, a limit of Spark that cannot be set; start the query again",
    r"Python worker exited unexpectedly": "the system may have killed it for its memory: run fewer "
    "tasks at a time, as with --master 'local[1]', or raise spark.executor.memoryOverhead",
    r"ExecutorLostFailure": "if the system killed the executor for its memory, raise "
    "spark.executor.memory or spark.executor.memoryOverhead",
    r"OutOfMemoryError|INVALID_DRIVER_MEMORY": _MEMORY,
    r"No space left on device|os error 28|Errno 28": "free space on the disk of the target, or of "
    "Spark's temporary files; --spark-conf spark.local.dir=DIR moves these",
    r"Unexpected end of (input stream|ZLIB)|incorrect (header|data) check": "the file is truncated "
    "or damaged; copy it again",
    r"Class org\.apache\.hadoop\.fs\.\S+ not found": "Spark needs a jar for this store, named in "
    "spark.jars.packages (how-to/pipeline-cluster.md)",
    r"ACCESS_DENIED|AccessDenied|40[13] Forbidden|NoAuthWithAWS|169\.254\.169\.254": _CREDENTIALS,
    r"UNAVAILABLE|INVALID_HANDLE\.SESSION_(NOT_FOUND|CHANGED|CLOSED)": "Spark Connect's server has "
    "stopped or started again; run the command again when it answers",
    r"does not exist in the JVM|Py4JException: \w+ .* does not exist": "the JVM runs another "
    "version of Spark than PySpark; unset SPARK_HOME, or install the PySpark of that version",
}
"""Pattern in the text of an exception and its causes -> what to do."""

_RAISED = re.compile(r"^(?:\w+: )*lisa\.\w[\w.]*\.(\w+): (.*)$", re.MULTILINE)
_CLASSIFIED = re.compile(r"^(?:[\w.$]+: )?\[[A-Z0-9_.]+\] (.*)$", re.MULTILINE)
_ANSWER = re.compile(r'^\s*details = "(.*)"$', re.MULTILINE)
"""The reason in an error of gRPC, and so of Spark Connect."""

_TRACEBACK = re.compile(
    r"^([ \t]*)(?:\S.*)?Traceback \(most recent call last\):\n(?:\1[ \t].*\n|[ \t]*\n)*\1(\S.*)",
    re.MULTILINE,
)
_STAGES = re.compile(
    r"Query \[id = .*?\] terminated with exception: |"
    r"Job aborted due to stage failure: .*?\(TID \d+\) \(.*? executor \w+\): "
)
_JAVA_TYPE = re.compile(r"^(?:[a-z]\w*\.)+[\w$]*(?:Exception|Error): ")


def unwrap(error: BaseException) -> LisaError | None:
    """The Lisa error that caused a Spark exception; None if there is none."""
    if isinstance(error, LisaError):
        return error
    # The last traceback is the unhandled error.
    for name, line in reversed(_RAISED.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LisaError):
            return kind(line.strip())
    return None


def one_line(error: BaseException) -> str:
    """The last cause of an exception of Spark, and what to do about it, in one line."""
    if type(error).__module__.startswith("py4j.") and (code := _jvm_exit_code()) is not None:
        return f"Spark's JVM has ended with exit code {code}: {_MEMORY}"
    cause, text = cause_of(error), "\n".join(_texts(error))
    cure = next((cure for pattern, cure in _CURES.items() if re.search(pattern, text)), None)
    return cause if cure is None else f"{cause.rstrip('.')}: {cure}"


def cause_of(error: BaseException) -> str:
    """The last cause of an exception of Spark in one line, without query plan and stack trace."""
    texts = _texts(error)
    raised = _TRACEBACK.findall("\n".join(texts))
    if raised:  # by Python, which has the last word
        return _plain(raised[-1][1])
    found = _CLASSIFIED.search(texts[0]) or _ANSWER.search(texts[0])
    first = _plain(found[1] if found else texts[0].strip().partition("\n")[0])
    last = _plain(texts[-1].strip().replace("\n", " ")) if len(texts) > 1 else ""
    if not last or last in first or first in last:
        return first or last or type(error).__name__
    return f"{first} {last}"


def _jvm_exit_code() -> int | None:
    """How this process's JVM ended; None while it runs, or if another process started it."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001
    return None if process is None else process.poll()


def _texts(error: BaseException) -> list[str]:
    """The text of an exception; that of one from the JVM has no causes, which follow."""
    thrown = getattr(error, "java_exception", None)
    try:
        return list(_java_texts(thrown)) if thrown is not None else [_without_colors(str(error))]
    except Exception:  # noqa: BLE001  the JVM has ended
        return [str(error)]


def _java_texts(thrown: Any) -> Iterator[str]:
    yield str(thrown.toString())
    while (thrown := thrown.getCause()) is not None:
        yield str(thrown.toString())


def _without_colors(text: str) -> str:
    """The text of an error without colors; delta-rs begins the line of each cause with one."""
    return re.sub(r"\x1b\[\d*m", "", re.sub(r"\n\s*\x1b\[\d*m", " ", text))


def _plain(line: str) -> str:
    """A line without Spark's prefixes and codes."""
    line = _STAGES.sub("", line.strip())
    line = re.sub(r"^pyspark\.[\w.]+: \[\w+\] |\s*SQLSTATE: \w+\s*", "", line)
    return _JAVA_TYPE.sub("", _JAVA_TYPE.sub("", line))


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise Lisa's errors unchanged, and Spark's own errors as a LisaError of one line.

    Raises ConfigError for errors of the input: a missing file, table or column, an invalid option
    of a reader, or a condition that divides by zero or compares text with a number.
    """
    try:
        yield
    except LisaError:
        raise
    except Exception as error:
        found = unwrap(error)
        if found is not None:
            raise found from error
        kind = type(error).__module__
        if kind in {"_internal", "deltalake.exceptions"}:  # delta-rs, such as a full disk
            raise LisaError(f"the archive's table failed: {one_line(error)}") from error
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise LisaError(one_line(error)) from error  # of files, also in an object store
        if not kind.startswith(("pyspark.", "py4j.")):
            raise
        if isinstance(error, _input_errors()):
            raise errors.ConfigError(one_line(error)) from error
        raise LisaError(f"Spark failed: {one_line(error)}") from error


def _input_errors() -> tuple[type[Exception], ...]:
    from pyspark import errors as spark

    return (
        spark.AnalysisException,
        spark.ArithmeticException,
        spark.DateTimeException,
        spark.IllegalArgumentException,
        spark.NumberFormatException,
        spark.ParseException,
    )
