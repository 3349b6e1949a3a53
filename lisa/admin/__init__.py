"""Administration: inspect topics and messages, empty garbage, check and repair the data.

The functions are flows over a `Store` (see `core.redis.flow`), shared by blocking and asyncio
callers: `store.drive(topics.counts(store, ["orders"]))`. No step blocks the server for more than
a few milliseconds, regardless of a topic's size.

The modules are imported on first use, as `admin.topics`, so that `lisa COMMAND --help` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.admin import acl as acl
    from lisa.admin import doctor as doctor
    from lisa.admin import fsck as fsck
    from lisa.admin import garbage as garbage
    from lisa.admin import groups as groups
    from lisa.admin import journal as journal
    from lisa.admin import limits as limits
    from lisa.admin import live as live
    from lisa.admin import messages as messages
    from lisa.admin import push as push
    from lisa.admin import roles as roles
    from lisa.admin import schedules as schedules
    from lisa.admin import topics as topics
    from lisa.admin import why as why


def __getattr__(name: str) -> ModuleType:
    if find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
