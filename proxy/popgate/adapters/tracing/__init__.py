"""Traces messages with OpenTelemetry. Only a proxy with --tracing imports this package, which needs an extra."""
