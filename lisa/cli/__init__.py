"""The command line: `lisa`, and its siblings `lisa-manager` and `lisa-consumer`."""
