"""Spark's daemon that forks Python workers, with Lisa's modules imported.

Spark ends idle workers after a minute. A new one then takes no second to import them again.
"""

from importlib import import_module

from pyspark import daemon

PRELOADED = (
    "pandas",
    "lisa.pipeline.archive.reading",
    "lisa.pipeline.source.snapshot",
    "lisa.pipeline.source.source",
    "lisa.pipeline.source.writer",
)

if __name__ == "__main__":
    for module in PRELOADED:
        import_module(module)
    daemon.manager()
