"""One module a measure; each has `measure(run)`, which adds figures to `run.results`."""
