"""OpenTelemetry traces and metrics, as middleware: `middleware=[Telemetry()]`.

Needs the extra `otel`; the application sets up the SDK. Without an SDK, `Telemetry` does nothing.
"""

try:
    from lisa.otel.telemetry import Telemetry
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "opentelemetry":
        raise
    missing = "OpenTelemetry is not installed: pip install opentelemetry-api"
    raise ModuleNotFoundError(missing, name=error.name) from None

__all__ = ["Telemetry"]
