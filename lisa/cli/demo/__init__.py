"""`lisa demo`: ten thousand orders time out, from an embedded server to their handlers."""
