"""Spark's daemon that forks Python workers, with Lisa's modules imported.

Spark ends idle workers after a minute. A new one then takes no second to import them again.
"""

from __future__ import annotations

import pandas as pd  # noqa: F401
from pyspark import daemon

if __name__ == "__main__":
    daemon.manager()
