"""Measures of Lisa that only a checkout takes; each module has `measure(run, sizes)`."""
