"""`make chaos`: a cluster under load and under a nemesis, then the audit. Runs for half an hour by default.

The same seed plans the same faults for the same parts, and the same client requests. The timing depends on the machine:
a fault is skipped if its part is still away.
"""

import argparse
import asyncio
import pickle
import random
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from chaos.nemesis import Fault, Nemesis
from chaos.servers import ChaosServers
from chaos.verdict import Verdict
from support.audit import Audit
from support.audit_causes import causes
from support.audit_client import RoamingClient
from support.audit_load import Habits, Load
from support.audit_redrives import REDRIVEN_TOPIC, RedrivenAudit, Redrives
from support.audit_rest import note_counts
from support.audit_rules import judge
from support.audit_told import raised
from support.processes import ServerFailedError
from support.rabbitmq_releases import RabbitRelease, find_release

SECONDS = 1_800.0
SEED_MAX = 2**32
QUEUES, REDRIVEN_QUEUES = 6, 2
MAX_DELIVERIES = 3
AUDIT_FILE = "audit.pickle"
"""The file with the whole history, beside the servers' logs."""
DRAIN_SECONDS_MAX = 120.0
"""Maximum seconds from the end of the faults until the group is drained; nothing is published in that time."""
GIVE_UP_SECONDS, MISSING_SECONDS = 120.0, 20.0
"""Seconds: a missing message may be on its way through several delay queues, each of which resends stuck messages."""
RUN_OUT_SECONDS = 8.0
"""Seconds; longer than any lease of the load."""
SAME_SECONDS, LOOKS_MAX = 1.0, 20
"""Dead letters are complete when two reads, this many seconds apart, find the same."""
REQUEST_TIMEOUT_SECONDS = 9.0
"""Seconds; longer than any pop waits, and shorter than the longest pauses: some requests are given up, and carried
out later.
"""
HABITS = Habits.with_everything(
    publishers=3,
    consumers=10,
    batch_max=64,
    body_bytes_max=1_000,
    open_max=1_500,
    rest_seconds_max=1.5,
    lease_seconds_min=2.0,
    lease_seconds=5.0,
    wait_seconds_max=5.0,
    hold_share=0.0,
    expire_share=0.05,
    extend_share=0.08,
    attempt_share=0.25,
    mixed_share=0.2,
    reject_share=0.2,
)


async def run(
    folder: Path,
    *,
    seed: int,
    seconds: float,
    release: RabbitRelease | None = None,
    without: Collection[Fault] = (),
) -> Verdict:
    """Run on the newest RabbitMQ, or the one that ``release`` names, with every fault that is not in ``without``.

    Raises: ServerMissingError, ServerFailedError, TimeoutError if the servers do not start.
    """
    audit = Audit()
    audit.max_deliveries = MAX_DELIVERIES
    audit.are_hand_outs_hidden = True
    servers = ChaosServers(folder, audit, release=release)
    try:
        await asyncio.to_thread(servers.start)
        urls = [proxy.url for proxy in servers.proxies.proxies]
        redriven = RedrivenAudit(audit)
        async with (
            _roaming(urls, audit, f"roaming {seed}") as client,
            _roaming(urls, redriven, f"redriven {seed}", topic=REDRIVEN_TOPIC) as taker,
        ):
            await client.create(queues=QUEUES, max_deliveries=MAX_DELIVERIES)
            await taker.create(queues=REDRIVEN_QUEUES)
            nemesis = Nemesis(servers, seed, without=without)
            stuck = ""
            try:
                async with Load(client, f"{seed}", HABITS) as load, Redrives(client, taker, f"{seed}") as redrives:
                    await nemesis.disturb(seconds)
                    servers.operator.end()
                    audit.heal(DRAIN_SECONDS_MAX)
                    await redrives.end(timeout_seconds=GIVE_UP_SECONDS)
                    await note_counts(
                        load, run_out_seconds=RUN_OUT_SECONDS, looks_max=LOOKS_MAX, look_seconds=SAME_SECONDS
                    )
                    await load.drain(timeout_seconds=GIVE_UP_SECONDS, missing_seconds=MISSING_SECONDS)
                    audit.drained()
                    await _empty(servers)
                    await client.note_dead_letters(looks_max=LOOKS_MAX, look_seconds=SAME_SECONDS)
            except* (TimeoutError, ServerFailedError) as error:
                stuck = "; ".join(raised(error))  # the promises until then are still judged
            with (folder / AUDIT_FILE).open("wb") as file:
                pickle.dump(audit, file)
            return Verdict(
                seed=seed,
                seconds=seconds,
                faults=nemesis.faults,
                operations={**audit.figures(), "redriven": len(audit.redriven)},
                refusals=Counter(client.refusals) + Counter(taker.refusals),
                repeats={str(cause): count for cause, count in causes(audit).items()},
                left=await asyncio.to_thread(servers.left_on_rabbitmq),
                dead_letters=len(audit.dead_letters or ()),
                failed_starts=servers.failed_starts,
                violations=judge(audit, drained=not stuck) + judge(redriven, drained=not stuck),
                ended=servers.ended,
                tracebacks=servers.tracebacks(),
                stuck=stuck,
            )
    finally:
        await asyncio.to_thread(servers.close)


def _roaming(urls: Sequence[str], audit: Audit, seed: str, *, topic: str = "audit") -> RoamingClient:
    return RoamingClient(urls, audit, random.Random(seed), timeout_seconds=REQUEST_TIMEOUT_SECONDS, topic=topic)


async def _empty(servers: ChaosServers) -> None:
    """Return when RabbitMQ itself has nothing left, because copies whose publish was never answered come late; or,
    after a time limit, with what it has left.
    """
    for _ in range(LOOKS_MAX):
        if not await asyncio.to_thread(servers.left_on_rabbitmq):
            return
        await asyncio.sleep(SAME_SECONDS)


def main(flags: Sequence[str]) -> int:
    """Return 0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of fault injection")
    parser.add_argument("--seed", type=int, default=None, help="seed of the run to repeat (default: random)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep logs and data here (default: only after failures)"
    )
    arguments = parser.parse_args(flags)
    seed = secrets.randbelow(SEED_MAX) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"chaos: seed {seed}, {arguments.seconds:g} s, RabbitMQ {find_release()}\n")
    sys.stdout.flush()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="popgate-chaos-"))
    verdict = asyncio.run(run(folder, seed=seed, seconds=arguments.seconds))
    sys.stdout.write(f"{verdict}\n")
    if verdict.is_good and arguments.folder is None:
        shutil.rmtree(folder)
    else:
        sys.stdout.write(f"logs and data are kept in {folder}\n")
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
