"""The decisions of the balance in every state that small groups can get into. `explorer.verdict` defines the promises.

`make explore` does the same for larger groups. test_balance_mistakes shows that mistakes are found.
"""

import pytest

from explorer.cases import SHORT
from explorer.group import Case
from explorer.verdict import judge

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_every_path_ends_in_balance_and_breaks_no_promise(case: Case) -> None:
    assert judge(case).complaints == []
