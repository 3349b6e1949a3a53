"""The native API, `/v1`: Lisa as JSON over HTTP, with a generated OpenAPI description.

Each operation is declared at its handler, beside its request and response types, in `sending`,
`messages`, `keyed`, `deliveries`, `schedules`, `topics`, `pushes` or `roles`.
"""

from __future__ import annotations

from starlette.routing import BaseRoute

from lisa.gateway.api import deliveries, keyed, messages, pushes, roles, schedules, sending, topics
from lisa.gateway.api.description import description_operations
from lisa.gateway.api.operations import Operation, routes_of
from lisa.gateway.context import GatewayContext

__all__ = ["OPERATIONS", "routes"]

OPERATIONS: list[Operation] = [
    *sending.operations,
    *messages.operations,
    *keyed.operations,
    *deliveries.operations,
    *messages.garbage_operations,
    *schedules.operations,
    *topics.operations,
    *pushes.operations,
    *roles.operations,
]
"""All operations, in the order of the documentation."""


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The routes of all operations and of their description."""
    return [*routes_of(gateway, [*OPERATIONS, *description_operations(OPERATIONS)])]
