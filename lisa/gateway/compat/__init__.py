"""The wire formats of the systems that Lisa succeeds: one module for each."""
