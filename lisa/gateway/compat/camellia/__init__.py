"""The HTTP API of Camellia's delay queue: `/camellia/delayQueue/*` and `/camellia/health/*`.

Its Java SDK works unchanged. Defects of the original are not reproduced:
`docs/how-to/from-camellia.md` lists the differences, and tests refer to the defects by number.
"""

from __future__ import annotations

from starlette.routing import BaseRoute

from lisa.gateway.compat.camellia.endpoints import Endpoints
from lisa.gateway.context import GatewayContext

__all__ = ["routes"]


def routes(gateway: GatewayContext) -> list[BaseRoute]:
    """The routes of Camellia's API. Adds the service that counts requests per interval."""
    endpoints = Endpoints(gateway)
    gateway.add_service(endpoints.monitor.run, "camellia's monitor")
    return endpoints.routes()
