"""Runs roles, each as its own user, and records which commands they call or are refused."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from lisa.admin import acl
from lisa.core.model.keys import Keys
from lisa.core.store import server_checks
from tests.roles import Cast
from tests.servers import connect, flush

PASSWORD = "correct horse"
DATABASE = 1  # not the first, so that it must be selected
KEYS = Keys()


class Stage:
    """An empty server, and one user with the rights of a role.

    `url` is for that user, `plain` for an unrestricted one that prepares and inspects.
    """

    def __init__(self, url: str, role: str) -> None:
        flush(url)
        parts = urlsplit(url)
        self.server = url
        self.role = role
        self.user = f"lisa-{role}"
        self.plain = f"redis://{parts.hostname}:{parts.port}/{DATABASE}"
        self.url = f"redis://{self.user}:{PASSWORD}@{parts.hostname}:{parts.port}/{DATABASE}"
        self.admin: Any = connect(self.plain)
        self._store = Cast(self.plain).store
        self.ask = self._store.ask
        self.called: set[str] = set()
        self.newer = [one for one in acl.NEWER if self.ask("COMMAND", "INFO", one)[0]]
        self.rights = acl.rights_of([role], newer=self.newer)
        self.give(self.rights)
        self.ask("ACL", "LOG", "RESET")

    def give(self, rights: Sequence[str]) -> None:
        """Give the user exactly these rights."""
        line = acl.line(self.user, [self.role], rights, KEYS, password=PASSWORD, style="setuser")
        self.ask(*line.split())

    @contextmanager
    def watched(self, *, is_new: bool = True) -> Iterator[None]:
        """Record the commands called in the block. Only the role may run there.

        `is_new`: the server has neither layout nor scripts.
        """
        if is_new:
            self.admin.delete(KEYS.schema)
        self.ask("SCRIPT", "FLUSH")
        server_checks._seen.clear()
        self.ask("CONFIG", "RESETSTAT")
        yield
        self.called |= self._calls() - {"config|resetstat", "auth"}

    def unused(self) -> set[str]:
        """The rights that the role has not used so far."""
        return set(self.rights) - self.called - self._calls()

    def _calls(self) -> set[str]:
        rows = self.ask("INFO", "commandstats").decode().splitlines()
        found = [row.removeprefix("cmdstat_").partition(":") for row in rows]
        return {
            name for name, _, figures in found if figures and not figures.startswith("calls=0,")
        }

    def refused(self) -> list[str]:
        """The refusals in the server's ACL log."""
        found = []
        for row in self.ask("ACL", "LOG"):
            one = dict(zip(row[::2], row[1::2], strict=True))
            found.append(
                " ".join(one[name].decode() for name in (b"username", b"reason", b"object"))
            )
        return found

    def cast(self, topic: str = "orders", group: str = "g") -> Cast:
        """A producer and consumer made of single transitions, with all rights."""
        return Cast(self.plain, topic, group, self._store)

    def close(self) -> None:
        self.ask("ACL", "DELUSER", self.user)
        self.admin.close()
        self._store.close()
