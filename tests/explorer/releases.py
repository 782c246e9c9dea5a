"""How many releases a group needs to become balanced: with the published algorithm, with ours, and the minimum."""

from collections.abc import Iterator, Sequence
from statistics import median

from explorer.moving import Moves, Scene, move
from popgate.domain.balance import Handover

SIZES = [(12, 3, 20), (12, 6, 20), (60, 6, 20), (103, 10, 5), (1_000, 50, 1)]
"""Queues, members, and number of runs."""
LIMIT_SECONDS = 900.0
HEAD = "| queues x members | what happens | fewest possible | as published | take | claim | sole |"


def rows() -> Iterator[str]:
    yield HEAD
    yield "|---|---|---|---|---|---|---|"
    for queues, members, runs in SIZES:
        for scene in Scene:
            by_driver: list[list[Moves]] = [
                [move(scene, queues, members, handover, seed=seed, limit=LIMIT_SECONDS) for seed in range(runs)]
                for handover in (None, Handover.TAKE, Handover.CLAIM, Handover.SOLE)
            ]
            told = " | ".join(tell(moves) for moves in by_driver)
            yield f"| {queues} x {members} | {scene.value} | {by_driver[0][0].fewest} | {told} |"


def tell(moves: Sequence[Moves]) -> str:
    """Return the interruptions of all runs, and the median seconds until balance."""
    counts = [one.interruptions for one in moves]
    span = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    seconds = [one.seconds for one in moves if one.seconds is not None]
    if len(seconds) < len(moves):
        return f"{span}, not in {LIMIT_SECONDS:.0f} s"
    return f"{span} in {median(seconds):.0f} s"
