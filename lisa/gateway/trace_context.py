"""W3C trace context on its way through the gateway: request to message, and message to push."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?\Z")
_STATE = re.compile(r"[\x20-\x7e]{1,512}\Z")
PARENT, STATE = "traceparent", "tracestate"


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """The valid headers `traceparent` and `tracestate`; empty without the first."""
    parent = headers.get(PARENT)
    if parent is None or not _PARENT.match(parent):
        return {}
    state = headers.get(STATE)
    return {PARENT: parent, STATE: state} if state and _STATE.match(state) else {PARENT: parent}


def with_trace(own: Mapping[str, str] | None, trace: Mapping[str, str]) -> Mapping[str, str] | None:
    """A message's headers with the trace context of its request, unless it has one of its own."""
    return own if not trace or (own and PARENT in own) else {**(own or {}), **trace}
