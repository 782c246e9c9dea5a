"""A process goes before others, and is then one of them again."""

import os
import subprocess
from pathlib import Path

import pytest

from support import precedence


@pytest.mark.skipif(not precedence.is_allowed(), reason="only root may go before others")
def test_a_server_and_this_process_go_first_until_the_end_of_the_block() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as server:

        def nice() -> set[int]:
            autogroup = int(Path(f"/proc/{server.pid}/autogroup").read_text().split()[-1])
            return {os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, server.pid), autogroup}

        with precedence.precedence([server.pid]):
            assert nice() == {precedence.FIRST}
        assert nice() == {precedence.USUAL}
        with precedence.precedence([server.pid]):
            server.kill()
            server.wait()
    assert os.getpriority(os.PRIO_PROCESS, 0) == precedence.USUAL
