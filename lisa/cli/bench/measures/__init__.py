"""One module per measure; each has `measure(run)`, which adds figures to `run.results`."""
