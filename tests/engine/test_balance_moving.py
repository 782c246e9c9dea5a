"""Large groups become balanced with the fewest interruptions; the published algorithm needed several times as many."""

import pytest

from explorer.moving import Scene, move
from popgate.domain.balance import Handover

LIMIT_SECONDS = 300.0


@pytest.mark.parametrize("scene", Scene)
@pytest.mark.parametrize(("queues", "members"), [(12, 3), (12, 6), (60, 6), (103, 10)])
def test_no_consumer_is_interrupted_more_often_than_need_be(queues: int, members: int, scene: Scene, seed: int) -> None:
    for handover in Handover:
        moves = move(scene, queues, members, handover, seed=seed, limit=LIMIT_SECONDS)
        assert moves.interruptions == moves.fewest
        assert moves.seconds is not None
        assert moves.seconds < 60
    published = move(scene, queues, members, None, seed=seed, limit=LIMIT_SECONDS)
    assert published.interruptions > published.fewest
