"""The embedded Valkey server that `lisa demo`, `lisa up` and the tests use."""

from lisa.embedded.process import RoleProcess
from lisa.embedded.server import EmbeddedServer, binary

__all__ = ["EmbeddedServer", "RoleProcess", "binary"]
