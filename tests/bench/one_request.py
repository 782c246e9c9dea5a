"""How long single requests over one kept connection take, compared with another checkout of popgate in the same run.

    python tests/bench/one_request.py OTHER_CHECKOUT

Both proxies run embedded at the same time and get requests in turns, so that other load on the machine affects both.
"""

import http.client
import statistics
import sys
import tempfile
import time
from pathlib import Path

from support.proxy import ProxyProcess

ROUNDS = 40
REQUESTS = 250


def median_seconds(proxy: ProxyProcess, connection: http.client.HTTPConnection) -> float:
    """Return the median time of pops that find nothing and wait for nothing: the HTTP interface, and little else."""
    times: list[float] = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        connection.request("POST", "/v1/topics/t/groups/default/pop", b"{}", {"content-type": "application/json"})
        connection.getresponse().read()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main(other: Path) -> None:
    path = ":".join(str(other / folder) for folder in ("proxy", "clients/python"))
    with tempfile.TemporaryDirectory() as folder:
        here = ProxyProcess(Path(folder) / "here")
        there = ProxyProcess(Path(folder) / "there", environment={"PYTHONPATH": path})
        with here, there:
            sides = [(one, http.client.HTTPConnection("127.0.0.1", one.port)) for one in (here, there)]
            rounds = [[median_seconds(*side) for side in sides] for _ in range(ROUNDS)]
    mine, others = (statistics.median(one[side] for one in rounds) for side in (0, 1))
    ratio = statistics.median(one[0] / one[1] for one in rounds)
    print(f"here {1e6 * mine:.0f} us, there {1e6 * others:.0f} us a request; ratio {ratio:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
