"""OpenTelemetry traces and metrics, as middleware: `middleware=[Telemetry()]`.

Needs the extra `otel`; the application sets up the SDK. Without an SDK, `Telemetry` does nothing.
"""

from lisa.core.model.extras import requires

with requires("otel"):
    from lisa.otel.telemetry import Telemetry

__all__ = ["Telemetry"]
