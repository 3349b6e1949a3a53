"""Extracts Lisa's errors from Spark's exceptions.

Spark wraps an error raised by a task, a data source or a query in an exception whose text is a page
of tracebacks. Users only need the one line of Lisa's error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lisa.core.model import errors
from lisa.core.model.errors import LisaError

_RAISED = re.compile(r"^(?:\w+: )*lisa\.\w[\w.]*\.(\w+): (.*)$", re.MULTILINE)
_ANALYSIS = re.compile(r"^\[[A-Z_.]+\] (.*)$", re.MULTILINE)


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
    """Spark's own error message in one line, without query plan and stack trace."""
    thrown = getattr(error, "java_exception", None)  # py4j's text lacks the cause
    text = str(error) if thrown is None else str(thrown.toString())
    if thrown is not None and "[FAILED_READ_FILE" in text and thrown.getCause() is not None:
        text = f"{text.partition(' SQLSTATE')[0]} {thrown.getCause().getMessage()}"
        text = text.replace("\n", " ")
    found = _ANALYSIS.search(text)
    line = found[1] if found else text.strip().partition("\n")[0]
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", line) or type(error).__name__


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
