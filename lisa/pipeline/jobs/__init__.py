"""The jobs of `lisa pipeline NAME` as functions."""
