"""A server of one's own: what `lisa demo`, `lisa up` and the tests run on."""

from lisa.embedded.process import RoleProcess
from lisa.embedded.server import EmbeddedServer, binary

__all__ = ["EmbeddedServer", "RoleProcess", "binary"]
