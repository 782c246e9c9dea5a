"""The slips of `make mutate` can be planted in the present product, and their tests exist."""

import pytest

from mutants.run import PROJECT, TESTS, path_of, planted
from mutants.slip import Slip
from mutants.slips import SLIPS


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: slip.file)
def test_a_slip_can_be_planted(slip: Slip) -> None:
    source = (PROJECT / path_of(slip)).read_text()
    mutant = planted(slip, source)
    assert mutant != source
    if slip.file.endswith(".py"):
        compile(mutant, slip.file, "exec")
    assert all((TESTS / test.partition("::")[0]).is_file() for test in slip.tests)


def test_a_slip_that_no_longer_fits_is_named() -> None:
    with pytest.raises(ValueError, match="stands there 0 times"):
        planted(SLIPS[0]._replace(before="not there"), "something else")
