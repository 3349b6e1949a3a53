"""The native API, `/v1`: all of Lisa as JSON over HTTP, and its description.

`table` says what there is, `operations` how a request comes to it, `models` what it takes and
answers; the handlers stand in `sending`, `messages`, `deliveries`, `garbage`, `topics`, `roles` and
`events`.
"""

from __future__ import annotations

from starlette.routing import BaseRoute

from lisa.gateway.hub import Hub
from lisa.gateway.native.description import described
from lisa.gateway.native.operations import Native
from lisa.gateway.native.table import operations

__all__ = ["routes"]


def routes(hub: Hub) -> list[BaseRoute]:
    """One route for all operations: it knows their paths better than a list of patterns would."""
    found = operations()
    return [Native(hub, [*found, *described(found)])]
