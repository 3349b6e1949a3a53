"""One data source with four faces: batch and streaming write, live snapshot, journal stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType

__all__ = ["LisaDataSource"]


class LisaDataSource(DataSource):
    """`format("lisa")`. What each face takes is described in its own module."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "lisa"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001
        """Rows become messages; see `lisa.pipeline.source.writer`."""
        from lisa.pipeline.source.writer import LisaWriter

        if overwrite:
            raise ConfigError('format("lisa") only adds messages: write with mode("append")')
        return LisaWriter(self.options, schema)

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamArrowWriter:
        """Each batch's rows become messages; see `lisa.pipeline.source.writer`."""
        from lisa.pipeline.source.writer import LisaStreamWriter

        if overwrite:
            raise ConfigError('format("lisa") only adds messages: write with outputMode("append")')
        return LisaStreamWriter(self.options, schema)

    def schema(self) -> StructType:
        """The columns of what is read, live or from the journal (see read_columns)."""
        from lisa.pipeline.source.read_columns import READ_SCHEMA

        return READ_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """A snapshot of the live messages."""
        from lisa.pipeline.source.snapshot import SnapshotReader

        return SnapshotReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        """A follower of the journal."""
        from lisa.pipeline.source.journal import JournalReader

        return JournalReader(self.options, schema)
