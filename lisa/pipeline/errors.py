"""What went wrong inside Spark, as Lisa's own error again.

Spark wraps what a task, a data source or a query raised into an exception of its own whose text is
a page of tracebacks. Lisa's line is in there, and is all that a user needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lisa.core import errors
from lisa.core.errors import LisaError

__all__ = ["unwrap", "unwrapped"]

_RAISED = re.compile(r"^(?:\w+: )*lisa\.\w[\w.]*\.(\w+): (.*)$", re.MULTILINE)
_ANALYSIS = re.compile(r"^\[[A-Z_.]+\] (.*)$", re.MULTILINE)


def unwrap(error: BaseException) -> LisaError | None:
    """The error of Lisa's that Spark's tells of, or None if it tells of another."""
    if isinstance(error, LisaError):
        return error
    # The last one is the one that was not handled.
    for name, line in reversed(_RAISED.findall(str(error))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LisaError):
            return kind(line.strip())
    return None


def told(error: BaseException) -> str:
    """What Spark says itself, in one line: its condition's text, without plan and stack trace."""
    thrown = getattr(error, "java_exception", None)  # py4j's own text says only where, not what
    text = str(error) if thrown is None else str(thrown.toString())
    found = _ANALYSIS.search(text)
    line = found[1] if found else text.strip().partition("\n")[0]
    return re.sub(r"\s*SQLSTATE: \w+\s*$", "", line) or type(error).__name__


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise Lisa's errors as they are, and Spark's own as a LisaError of one line.

    What Spark refuses before it runs (a file or table that is not there, a column that does not
    exist) is a ConfigError.
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
        if not kind.startswith(("pyspark.", "py4j.")):
            raise
        from pyspark.errors import AnalysisException, ParseException

        if isinstance(error, (AnalysisException, ParseException)):
            raise errors.ConfigError(told(error)) from error
        raise LisaError(f"Spark failed: {told(error)}") from error
