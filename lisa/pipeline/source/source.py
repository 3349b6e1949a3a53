"""The data source: batch and streaming writes, snapshots of live messages, journal streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType


class LisaDataSource(DataSource):
    """`format("lisa")`. The modules of the readers and writers describe their options."""

    @classmethod
    def name(cls) -> str:
        """The name to pass to `format`."""
        return "lisa"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001
        """A writer that sends rows as messages; see `lisa.pipeline.source.writer`."""
        from lisa.pipeline.source.writer import LisaWriter

        if overwrite:
            raise ConfigError('format("lisa") only appends messages: write with mode("append")')
        return LisaWriter(self.options, schema)

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamArrowWriter:
        """A writer that sends each batch's rows as messages; see `lisa.pipeline.source.writer`."""
        from lisa.pipeline.source.writer import LisaStreamWriter

        if overwrite:
            raise ConfigError(
                'format("lisa") only appends messages: write with outputMode("append")'
            )
        return LisaStreamWriter(self.options, schema)

    def schema(self) -> StructType:
        """The columns of both reads, live and journal (see read_columns)."""
        from lisa.pipeline.source.read_columns import READ_SCHEMA

        return READ_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of a snapshot of the live messages."""
        from lisa.pipeline.source.snapshot import SnapshotReader

        return SnapshotReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        """A reader of the journal."""
        from lisa.pipeline.source.journal import JournalReader

        return JournalReader(self.options, schema)
