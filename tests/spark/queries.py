"""Runs a streaming query in a separate process, which can be killed and started again on the same checkpoint."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from spark.death import Death
from support.processes import Server, wait_until
from support.proxy import python_program
from support.spark import environment, require_java

END_SECONDS = 400


class SparkQuery(Server):
    """One run of `query_program`; ready when the query has started. `local[2,4]` tries a task four times."""

    ready_timeout_seconds = 400
    stop_timeout_seconds = 60

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, object],
        *,
        trigger: str = "on",
        master: str = "local[2,4]",
        sink: Mapping[str, object] | None = None,
    ) -> None:
        require_java()
        given = [json.dumps({name: str(value) for name, value in one.items()}) for one in (options, sink or {})]
        super().__init__(
            "Spark query",
            folder,
            arguments=python_program("-m", "spark.query_program", str(folder), master, trigger, *given),
            environment={**os.environ, **environment()},
        )
        self.death = Death(folder)

    def _answers(self) -> bool:
        return "started" in self.output

    def run_to_its_end(self) -> None:
        """Run a query with the trigger "now" to its end. Raises: ServerFailedError."""
        self.launch()
        if self.wait(END_SECONDS):
            raise self.failure("failed")

    def run_until(self, happened: Callable[[], bool], what: str) -> None:
        """Start the query, and kill it as soon as something has happened. Raises: ServerFailedError, TimeoutError."""
        self.launch()
        wait_until(lambda: happened() or not self.is_running(), timeout_seconds=END_SECONDS, what=what)
        if not happened():
            raise self.failure(f"ended before {what}")
        self.kill()

    def run_to_its_death(self, step: str, epoch: int) -> None:
        """Start the query, and return when it has killed itself at this point. Raises: ServerFailedError."""
        self.death.order(step, epoch)
        self.launch()
        self.wait(END_SECONDS)
        if self.death.is_due:
            raise self.failure(f"did not die {step} of batch {epoch}")

    def workers(self, word: str) -> list[psutil.Process]:
        """Return the driver's child processes whose command line contains this word."""
        found: list[psutil.Process] = []
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                if any(word in part for part in process.cmdline()):
                    found.append(process)
            except psutil.Error:  # it has ended
                continue
        return found
