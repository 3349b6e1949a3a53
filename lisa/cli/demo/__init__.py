"""`lisa demo`: ten thousand order time-outs on an embedded server."""
