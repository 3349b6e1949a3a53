"""A server of one's own: what `lisa demo`, `lisa up` and the tests run on."""

from lisa.embedded.server import EmbeddedServer, binary

__all__ = ["EmbeddedServer", "binary"]
