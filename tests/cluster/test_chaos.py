"""A whole cluster under load, whose parts are killed, paused and cut off at random: every promise is kept.

The short form of `make chaos`.
"""

from pathlib import Path

import pytest

from chaos.run import run
from support.processes import ServerMissingError

SECONDS, SECONDS_FULL = 60.0, 600.0

pytestmark = pytest.mark.crash


async def test_every_promise_is_kept_whatever_is_done_to_the_parts(
    tmp_path: Path, seed: int, full_run: bool, request: pytest.FixtureRequest
) -> None:
    try:
        verdict = await run(tmp_path, seed=seed, seconds=SECONDS_FULL if full_run else SECONDS)
    except ServerMissingError:
        for server in ("rabbitmq", "redis_server"):
            request.getfixturevalue(server)  # which fails or skips as the run's rules say
        raise
    print(f"\n{verdict}")  # noqa: T201 - the result
    assert verdict.is_good, str(verdict)
    operations = verdict.operations
    assert min(operations["published"], operations["leases"], operations["acked"]) > 0
