"""The command line: `lisa`, `lisa-manager`, `lisa-consumer` and `lisa-gateway`."""
