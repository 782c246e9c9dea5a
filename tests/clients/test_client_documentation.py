"""Every example of docs/python-client.md runs unchanged, as a separate program, and prints the expected output."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from popgate_client import Client, Consumer, PopgateError, errors
from popgate_client.exchange import RETRY_SECONDS_MAX
from support.processes import Server, wait_until
from support.proxy import ProxyProcess

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"
EXAMPLE_SECONDS = 30


class Example(NamedTuple):
    """One block of the page. `publish`: bodies to publish first; `prints`: parts of its expected output.

    `runs_on`: it ends only by a signal.
    """

    begins_with: str
    publish: Sequence[str] = ()
    prints: Sequence[str] = ()
    runs_on: bool = False


def asyncio_example(line: str) -> str:
    return (
        "import asyncio\n\nfrom popgate_client import AsyncClient\n\n\nasync def main() -> None:\n"
        f"    async with AsyncClient() as client:\n{line}"
    )


EXAMPLES = [
    Example('from popgate_client import Client\n\nwith Client() as client:\n    client.publish("orders", "a text"'),
    Example(
        "from popgate_client import Client, OutgoingMessage\n\nwith Client() as client:\n    first",
        prints=["published ", " None\n"],
    ),
    Example("import json\nfrom dataclasses import asdict, dataclass", prints=["Ada ordered at 20"]),
    Example(
        "from popgate_client import Client\n\nwith Client() as client:\n    print",
        prints=["published\nduplicate\n"],
    ),
    Example(
        'from popgate_client import Client\n\nwith Client() as client:\n    client.publish("orders", "in a second"',
        prints=["[]\nin a second\n"],
    ),
    Example(
        "from popgate_client import Client, OutgoingMessage\n\nwith Client() as client:\n    plain",
        prints=["['first try']\n"],
    ),
    Example("from popgate_client import Client, token_in"),
    Example("import ssl\n\nfrom popgate_client import Client\n\n\ndef secure_client"),
    Example("from popgate_client import Client, LeaseLost", publish=["first"], prints=["got first delivery 1\n"]),
    Example("from popgate_client import Client\n\nwith Client() as client:\n    messages", ["a"], ["acked\n"]),
    Example(asyncio_example('        await client.publish("orders"'), prints=["hello\n"]),
    Example(
        "import logging",
        publish=["nonsense", "early", "sense"],
        prints=["handled sense\n", "is draining"],
        runs_on=True,
    ),
    Example(
        "import asyncio\n\nfrom popgate_client import Consumer",
        publish=["one", "two"],
        prints=["handled one\n", "handled two\n", "2 acked\n"],
    ),
    Example("import threading", publish=["first"], prints=["pull last\n", "changed over 1 time\n"]),
    Example(
        "import time\n\nfrom popgate_client import Client, Fenced",
        publish=["a", "b"],
        prints=["pull (0, 1)\n", "1 committed\n"],
    ),
    Example(
        "from popgate_client import Client\n\nwith Client() as client:\n    first", publish=["a"], prints=["True\n"]
    ),
    Example("from popgate_client import Client, PopgateError", publish=["a"], prints=["fix the request: max_messages"]),
    Example(
        "from popgate_client import Client, Conflict",
        publish=["a", "b"],
        prints=["no such customer 1 ", "done 1 redriven\n", "letters purged\n", "messages purged\n"],
    ),
    Example(
        'from popgate_client import Client\n\nwith Client() as client:\n    client.publish("rea',
        prints=["nightly 1 leased 3\n", "3 acked\n"],
    ),
    Example(asyncio_example('        await client.publish("measures"'), prints=["1 held\n2 acked\n"]),
    Example(
        "from popgate_client import Client, LockNotAcquired",
        prints=["first part, with a token\nsecond part, with a token\n"],
    ),
    Example(
        "import asyncio\n\nfrom popgate_client import AsyncClient, LockLost",
        prints=["mine\nstopped: lock scheduler is lost: an operator released it"],
    ),
    Example(
        "from popgate_client import Client\n\nwith Client() as client:\n    client.put_lock", prints=["['billing-7']\n"]
    ),
    Example(
        "from popgate_client import Client, TopicNotFound",
        prints=["5\n", "0 ready, 0 of them blocked, 0 in flight\n", "'invoices'", "gone\n"],
    ),
]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture
def orders(shared_proxy: ProxyProcess) -> Iterator[Client]:
    """A client, with an empty topic "orders" as the examples need it."""
    with Client(shared_proxy.url) as client:
        client.put_topic("orders", queues=2)
        client.put_group("orders", "default")
        yield client
        client.delete_topic("orders")


class Program(Server):
    """An example that runs until it gets a signal; ready once it has printed something."""

    ready_timeout_seconds = EXAMPLE_SECONDS
    stop_timeout_seconds = EXAMPLE_SECONDS

    def __init__(self, folder: Path, source: str, url: str) -> None:
        program = [sys.executable, "-W", "error", "-c", source]
        super().__init__("example", folder, arguments=program, environment={"POPGATE_URL": url})

    def _answers(self) -> bool:
        return bool(self.output)


def test_every_block_is_an_example_that_is_run() -> None:
    found = [sum(block.startswith(example.begins_with) for example in EXAMPLES) for block in blocks()]
    assert found == [1] * len(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_an_example_runs_as_it_stands(
    example: Example, shared_proxy: ProxyProcess, orders: Client, tmp_path: Path
) -> None:
    (source,) = (block for block in blocks() if block.startswith(example.begins_with))
    if example.publish:
        assert all(result.ok for result in orders.publish("orders", *example.publish))
    if example.runs_on:
        with Program(tmp_path, source, shared_proxy.url) as program:
            wait_until(
                lambda: example.prints[0] in program.output and orders.stats("orders", "default")["in_flight"] == 0,
                timeout_seconds=EXAMPLE_SECONDS,
                what="the example to do its work",
            )
            assert program.stop() == 0
            output = program.output
        state = orders.stats("orders", "default")
        assert (state["ready"], state["delayed"], state["dead"]) == (0, 1, 1)
    else:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", source],
            env={"POPGATE_URL": shared_proxy.url},
            capture_output=True,
            text=True,
            timeout=EXAMPLE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        output = done.stdout
    for line in example.prints:
        assert line in output


def test_the_tables_tell_the_defaults_that_hold() -> None:
    page = PAGE.read_text()
    defaults = Consumer.__init__.__kwdefaults__ or {}
    rows = defaults_in("| option | default |")
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        if isinstance(default, bool):
            assert rows[name] == str(default), name
        elif default is not None:
            assert float(rows[name]) == default, name
        elif name.startswith(("invisibility", "retry")):
            assert rows[name] == "the group's policy", name
    assert f"({RETRY_SECONDS_MAX:.0f} seconds" in page


def test_the_table_of_a_locks_arguments_tells_what_holds() -> None:
    rows, defaults = defaults_in("| argument | default |"), Client.lock.__kwdefaults__ or {}
    assert {name: float(row) for name, row in rows.items() if row.isdigit()} == {
        name: default for name, default in defaults.items() if default is not None
    }
    assert rows.keys() == defaults.keys()


def defaults_in(header: str) -> dict[str, str]:
    """Return the table's value for each name."""
    table = PAGE.read_text().partition(header)[2].partition("\n\n")[0]
    return dict(
        re.findall(r"^\| `(\w+)` \| ([\w`]+|the group's policy|machine and process) \|", table, flags=re.MULTILINE)
    )


def test_the_page_and_the_tree_tell_every_exception() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PopgateError)}
    table = PAGE.read_text().partition("| exception |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([A-Z]\w+)`", table)) == kinds - {"PopgateError"}
    assert kinds <= set((errors.__doc__ or "").split())


def test_the_counts_of_a_subscription_are_the_ones_that_the_server_has(orders: Client) -> None:
    told = (Client.stats.__doc__ or "").partition(": ")[2]
    assert set(re.findall(r"(\w+)[,.]", re.sub(r" \(.*?\)", "", told, flags=re.DOTALL))) == set(
        orders.stats("orders", "default")
    )
