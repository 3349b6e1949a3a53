"""Camellia's delay queue, as its clients know it: `/camellia/delayQueue/*`, `/camellia/health/*`.

Its Java SDK works unchanged. What the original does wrong is not kept: the page
`docs/how-to/from-camellia.md` tells what differs, and tests go by the numbers of those defects.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from starlette.routing import BaseRoute

from lisa.gateway.compat.camellia.face import Face
from lisa.gateway.hub import Hub

__all__ = ["routes", "start"]

_faces: WeakValueDictionary[str, Face] = WeakValueDictionary()  # their routes keep them


def routes(hub: Hub) -> list[BaseRoute]:
    """Its paths on a hub."""
    face = _faces[hub.name] = Face(hub)
    return face.routes()


def start(hub: Hub) -> None:
    """Begin to count by intervals."""
    hub.keep_running(_faces[hub.name].monitor.run(), "camellia's monitor")
