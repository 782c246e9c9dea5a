"""Defines the settings that concern the log and traces."""

from dataclasses import dataclass

from popgate.config import values
from popgate.config.setting import setting
from popgate.runtime.log_levels import LEVELS
from popgate.runtime.logs import LogFormat

SLOW_REQUEST_SECONDS_MAX = 3_600.0


def _log_format(raw: object) -> LogFormat:
    return LogFormat(values.one_of(*LogFormat)(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of ``popgate serve`` that concern the log and traces."""

    log_level: str = setting(
        "debug, info, warning or error; popgate log-level changes it while the proxy runs",
        values.one_of(*LEVELS),
        "info",
        "LEVEL",
    )
    log_format: LogFormat = setting(
        "text or json: how the lines of the log are written to standard error", _log_format, LogFormat.TEXT, "FORMAT"
    )
    slow_request_seconds: float = setting(
        "warn of requests that take longer than this, without the time in which they wait for messages; 0: never",
        values.seconds(0, SLOW_REQUEST_SECONDS_MAX),
        5.0,
        "SECONDS",
    )
    """Seconds after which a request in progress is logged. 0 disables this."""
    tracing: bool = setting(
        "export traces with OpenTelemetry (OTLP over HTTP), as the variables OTEL_* say; needs the extra "
        "popgate[tracing]",
        values.switch,
        False,
        "BOOL",
        default_text="false",
    )
