"""HTTP APIs compatible with other delay queues, one module for each."""
