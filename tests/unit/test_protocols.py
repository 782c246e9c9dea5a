"""The version of their protocol that the proxies of a cluster speak."""

import pytest

from popgate.cluster.protocols import NAMED_COUNT_MAX, common_version
from popgate.domain.errors import NoCommonVersion
from popgate.domain.names import InstanceId
from popgate.ports.claims import Member


def members(*protocols: tuple[int, int]) -> list[Member]:
    return [Member(InstanceId(f"p{i}"), f"http://h{i}:1", spoken) for i, spoken in enumerate(protocols)]


@pytest.mark.parametrize(
    ("own", "others", "common"),
    [
        ((1, 1), [], 1),
        ((1, 2), [], 2),
        ((1, 2), [(1, 1)], 1),
        ((1, 3), [(1, 3), (2, 5)], 3),
        ((2, 2), [(1, 2), (2, 9)], 2),
        ((2, 4), [(1, 3), (3, 9)], 3),
    ],
)
def test_a_cluster_speaks_the_highest_version_that_all_of_it_can(
    own: tuple[int, int], others: list[tuple[int, int]], common: int
) -> None:
    assert common_version(own, members(*others)) == common


def test_where_there_is_no_common_version_one_line_names_both_ranges_and_what_to_do() -> None:
    with pytest.raises(NoCommonVersion) as caught:
        common_version((3, 4), members((1, 2), (2, 3), (1, 1)))
    assert caught.value.detail == (
        "this proxy speaks version 3 to 4 of the peer protocol, but the cluster has p0 at http://h0:1 (1 to 2), p2 at "
        "http://h2:1 (1): upgrade through a release that speaks both, or stop those proxies before you start this one"
    )


def test_not_every_proxy_of_a_large_cluster_is_named() -> None:
    with pytest.raises(NoCommonVersion) as caught:
        common_version((2, 2), members(*[(1, 1)] * 100))
    assert f"{100 - NAMED_COUNT_MAX} more:" in caught.value.detail
