"""Runs a function over a DataFrame's Arrow batches in Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Mapped", "map_batches"]

Mapped = Callable[[Iterator[Any]], Iterator[Any]]
"""Record batches -> record batches; called once for each task."""


def map_batches(rows: DataFrame, function: Mapped, schema: StructType) -> DataFrame:
    """`DataFrame.mapInArrow`, which asks for pandas without using it: the pipeline has none.

    Under Spark Connect, where there is no JVM beside Python, it is that very method.
    """
    java = getattr(rows, "_jdf", None)
    if java is None:
        return rows.mapInArrow(function, schema)
    udf = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[rows[name] for name in rows.columns])
    return DataFrame(java.mapInArrow(column._jc, False, None), rows.sparkSession)  # noqa: FBT003, SLF001
