"""A private Prometheus, with its tool ``promtool``, for tests of the metrics and of the alert rules."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser

from support.processes import PortBlock, Server, ServerMissingError
from support.proxy import plain_client

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "deploy" / "prometheus" / "alerts.yml"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popgate" / "prometheus"


# The library declares no types for it.
_read: Any = parser.text_string_to_metric_families  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def program(name: str) -> str:
    """Return the path of a program of Prometheus: an installed one, or one that .ci/unpack-prometheus has fetched.

    Raises: ServerMissingError.
    """
    found = shutil.which(name) or shutil.which(name, path=CACHE)
    if found is None:
        raise ServerMissingError(f"{name} is not installed; .ci/unpack-prometheus {CACHE} fetches it")
    return found


def promtool(*arguments: str, given: str | None = None) -> str:
    """Run promtool, and return its output. It must succeed."""
    done = subprocess.run(
        [program("promtool"), *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_open_metrics(text: str) -> list[Metric]:
    """Return the families of metrics in a text in the format OpenMetrics. Raises: ValueError if it is wrong."""
    return list(_read(text))


class Prometheus(Server):
    """A Prometheus that scrapes every second, and evaluates ``rules`` as often. ``jobs`` are scrape configurations."""

    ready_timeout_seconds = 20
    stop_timeout_seconds = 10

    def __init__(self, folder: Path, jobs: Sequence[Mapping[str, Any]], rules: Mapping[str, Any]) -> None:
        self._block = PortBlock()
        (port,) = self._block.ports
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yml").write_text(json.dumps(rules))  # JSON is YAML, too
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [dict(job) for job in jobs],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration))
        arguments = [
            program("prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        super().__init__("prometheus", folder, arguments=arguments)
        self.client = plain_client(f"http://127.0.0.1:{port}", timeout_seconds=10)

    def _answers(self) -> bool:
        try:
            return self.client.get("/-/ready").is_success
        except httpx.HTTPError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, which must be valid."""
        answered = self.client.get("/api/v1/query", params={"query": expression})
        assert answered.status_code == 200, f"{expression}: {answered.text}"
        result: list[dict[str, Any]] = json.loads(answered.text)["data"]["result"]
        return result

    def fired(self) -> set[str]:
        """Return the names of the alerts that have fired so far."""
        rows = self.query('count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))')
        return {row["metric"]["alertname"] for row in rows}

    def close(self) -> None:
        """End it."""
        super().close()
        self.client.close()
