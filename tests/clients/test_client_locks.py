"""Locks through the Python client, synchronous and asyncio: held by real proxies on both brokers, and lost."""

import asyncio
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from popgate.cli.commands import run
from popgate_client import (
    AsyncClient,
    AsyncHeldLock,
    Client,
    Conflict,
    HeldLock,
    LockLost,
    LockNotAcquired,
    LockNotFound,
    RetryLater,
    ServerFault,
    locks,
)
from popgate_client.exchange import Exchanges
from popgate_client.lock_terms import LockTerm, term_clock
from popgate_client.locks import LockExchanges, LockGrant
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess

PAGE = Path(__file__).parents[2] / "docs" / "locks.md"
LOSS_SECONDS = 8
"""Maximum seconds until a loss in these tests is noticed."""


@pytest.fixture
def name() -> str:
    """The name of a lock that no other test uses."""
    return f"lock-{secrets.token_hex(4)}"


@pytest.fixture
def impatient(wire_url: str) -> Iterator[Client]:
    """A client behind a relay that can be cut; it repeats only renewals."""
    with Client(wire_url, retry_seconds_max=0) as client:
        yield client


def is_free(client: Client, name: str) -> bool:
    return not client.get_lock(name)["holders"]


# ---------------------------------------------------------------- holding


def test_a_block_holds_it_longer_than_its_time_and_the_next_one_gets_it_afterwards(
    killable_proxy: ProxyProcess,
) -> None:
    with Client(killable_proxy.url) as client, Client(killable_proxy.url) as other, ThreadPoolExecutor(1) as threads:

        def next_one() -> tuple[float, int]:
            with other.lock("nightly", holder="second", wait_seconds=30) as lock:
                return time.monotonic(), lock.fencing_token

        with client.lock("nightly", holder="first", ttl_seconds=1) as lock:
            following = threads.submit(next_one)
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                assert not lock.lost.wait(0.2)
                assert not lock.is_lost
                assert not following.done()
            lock.verify()
            (holder,) = client.get_lock("nightly")["holders"]
            assert (holder["holder"], holder["slot"]) == ("first", lock.slot)
            with pytest.raises(LockNotAcquired) as raised, other.lock("nightly"):
                pass
            assert isinstance(raised.value, RetryLater)
            left_at = time.monotonic()
        entered_at, token = following.result(10)
    assert left_at <= entered_at < left_at + 1, "released, not run out"
    assert token > lock.fencing_token
    assert not lock.lost.is_set()
    with pytest.raises(LockLost, match="was released"):
        lock.raise_if_lost()


def test_the_holder_is_named_by_machine_and_process_where_it_says_nothing(client: Client, name: str) -> None:
    with client.lock(name) as lock:
        assert re.fullmatch(r".+:\d+", lock.holder)
        assert client.get_lock(name)["holders"][0]["holder"] == lock.holder
        assert lock.holder not in repr(vars(lock)["_grant"].token)
    assert is_free(client, name)


def test_what_the_block_raises_releases_it_too(client: Client, name: str) -> None:
    with pytest.raises(KeyError), client.lock(name):
        raise KeyError
    assert is_free(client, name)


def test_a_wait_of_several_requests_is_confirmed_before_the_block_begins(
    wire_url: str, client: Client, name: str, sent_requests: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS_MAX", 0.6)
    with Client(wire_url) as far, ThreadPoolExecutor(1) as threads:

        def second() -> bool:
            with far.lock(name, ttl_seconds=1, wait_seconds=20) as lock:
                lock.verify()
                return lock.is_lost

        with client.lock(name):
            waiting = threads.submit(second)
            wait_until(lambda: len(sent_requests) >= 3, timeout_seconds=10, what="the third request")
            time.sleep(0.5)  # a part of the third wait, so that the grant is not new when it comes
        assert waiting.result(10) is False
    words = [request.partition(b" HTTP")[0].rpartition(b"/")[2].decode() for request in sent_requests]
    assert words == ["acquire"] * 3 + ["renew", "verify", "release"]


def test_as_many_hold_a_semaphore_as_it_has_slots(client: Client, name: str) -> None:
    client.put_lock(name, "semaphore", slots=0)
    with pytest.raises(LockNotAcquired), client.lock(name, wait_seconds=0.2):
        pass
    client.put_lock(name, "semaphore", slots=2)
    with client.lock(name) as one, client.lock(name) as two:
        assert {one.slot, two.slot} == {1, 2}
        with pytest.raises(LockNotAcquired), client.lock(name):
            pass


# ---------------------------------------------------------------- losing


def test_a_server_that_is_gone_ends_it_by_the_clients_own_clock(
    impatient: Client, set_line: Callable[[bool], None], name: str
) -> None:
    told: list[HeldLock] = []

    def work() -> None:
        with impatient.lock(name, ttl_seconds=1.2, on_loss=told.append) as lock:
            set_line(False)
            lock.raise_if_lost()
            assert lock.lost.wait(LOSS_SECONDS)
            assert lock.is_lost
            for ask in (lock.raise_if_lost, lock.verify):
                with pytest.raises(LockLost):
                    ask()
            wait_until(lambda: told == [lock], timeout_seconds=LOSS_SECONDS, what="the callback")

    with pytest.raises(LockLost, match=r"was not renewed within 1\.2 s: no answer"):
        work()


def test_a_killed_proxy_has_lost_it(own_proxy: ProxyProcess) -> None:
    with Client(own_proxy.url) as client:

        def work() -> None:
            with client.lock("nightly") as lock:
                own_proxy.kill()
                own_proxy.restart()
                with pytest.raises(LockLost):
                    lock.verify()
                assert lock.lost.is_set()
                with client.lock("nightly", wait_seconds=5) as anew:
                    assert anew.fencing_token > lock.fencing_token

        with pytest.raises(LockLost, match="acquire it again"):
            work()


def test_a_line_that_comes_back_in_time_ends_nothing(
    wire_url: str, set_line: Callable[[bool], None], client: Client, name: str
) -> None:
    with Client(wire_url) as far, far.lock(name, ttl_seconds=1.5) as lock:
        set_line(False)
        time.sleep(0.8)  # renewals fail meanwhile
        set_line(True)
        assert not lock.lost.wait(0.9)
        lock.verify()
        (holder,) = client.get_lock(name)["holders"]
        assert holder["fencing_token"] == lock.fencing_token


def test_an_operators_release_is_learnt_with_the_next_renewal(client: Client, name: str) -> None:
    def work() -> None:
        with client.lock(name, ttl_seconds=1, holder="stuck") as lock:
            (released,) = client.force_release(name, holder="stuck")
            assert released["fencing_token"] == lock.fencing_token
            assert lock.lost.wait(LOSS_SECONDS)

    with pytest.raises(LockLost, match="operator"):
        work()


def test_an_operators_release_is_learnt_at_the_end_of_the_block_at_the_latest(client: Client, name: str) -> None:
    def work() -> None:
        with client.lock(name):
            client.force_release(name)

    with pytest.raises(LockLost, match="was no longer held when it was released"):
        work()


@pytest.mark.parametrize(
    "body",
    ["<html>we will be back soon</html>", "{}", '{"held":false,"fencing_token":7}', '{"held":true,"fencing_token":6}'],
)
@pytest.mark.parametrize("ask", ["renew", "verify"])
def test_only_popgates_own_answer_keeps_it(ask: str, body: str) -> None:
    exchanges = LockExchanges(Exchanges(), term_clock)
    grant = LockGrant(
        name="l", holder="h", token="t", fencing_token=7, slot=1, term=LockTerm("l", 30, term_clock(), random.Random())
    )
    exchange = getattr(exchanges, ask)(grant, 5)
    next(exchange)
    with pytest.raises(ServerFault):
        exchange.send(httpx.Response(200, text=body))


def test_a_repeated_release_tells_nothing(client: Client, name: str) -> None:
    exchanges = LockExchanges(Exchanges(), term_clock)
    grant = client.perform(exchanges.acquire(name, "h", 30, 0))
    exchange = exchanges.release(grant, retry_seconds_max=10)
    next(exchange)
    exchange.send(httpx.ReadTimeout("the answer is lost"))
    with pytest.raises(StopIteration) as ended:
        exchange.send(httpx.Response(200, json={"released": False}))
    assert ended.value.value is None


def test_a_release_that_fails_is_no_error_and_hides_none(
    impatient: Client, set_line: Callable[[bool], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(lock_name: str, error: Exception | None) -> None:
        with impatient.lock(lock_name, ttl_seconds=20):
            set_line(False)
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        work(name, KeyError())
    (told,) = caplog.messages
    assert told.startswith(f"a lock could not be released: lock={name} cause=")
    set_line(True)
    work(f"{name}-too", None)


def test_a_callback_that_fails_harms_nothing(client: Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(lock: HeldLock) -> None:
        raise KeyError(lock.name)

    def work() -> None:
        with client.lock(name, ttl_seconds=1, on_loss=fail) as lock:
            client.delete_lock(name)
            assert lock.lost.wait(LOSS_SECONDS)
            wait_until(lambda: "has failed" in caplog.text, timeout_seconds=LOSS_SECONDS, what="the callback")

    with pytest.raises(LockLost, match="deleted"):
        work()


FROZEN = """
import sys
from popgate_client import Client, LockLost

with Client() as client:
    try:
        with client.lock(sys.argv[1], ttl_seconds=1, on_loss=lambda lock: print("told", flush=True)) as lock:
            print(lock.fencing_token, flush=True)
            sys.stdin.readline()
            print(lock.is_lost, flush=True)
            print(lock.lost.wait(5), flush=True)
    except LockLost:
        print("lost")
"""


def test_a_client_that_stood_still_finds_itself_lost_while_somebody_else_holds_it(
    shared_proxy: ProxyProcess, client: Client, name: str
) -> None:
    program = [sys.executable, "-W", "error", "-c", FROZEN, name]
    with subprocess.Popen(
        program, env={"POPGATE_URL": shared_proxy.url}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as frozen:
        assert frozen.stdout is not None
        token = int(frozen.stdout.readline())
        frozen.send_signal(signal.SIGSTOP)
        with client.lock(name, wait_seconds=10) as lock:
            assert lock.fencing_token > token
            frozen.send_signal(signal.SIGCONT)
            out, _ = frozen.communicate("go on\n", timeout=20)
            lock.verify()
    assert frozen.returncode == 0
    assert sorted(out.split()) == ["True", "True", "lost", "told"]
    assert out.endswith("lost\n")


# ---------------------------------------------------------------- asyncio


async def test_a_block_of_asyncio_holds_it_longer_than_its_time(shared_proxy: ProxyProcess, name: str) -> None:
    async with AsyncClient(shared_proxy.url) as client, AsyncClient(shared_proxy.url) as other:
        async with client.lock(name, ttl_seconds=1) as lock:
            await asyncio.sleep(1.3)
            lock.raise_if_lost()
            await lock.verify()
            with pytest.raises(LockNotAcquired):
                async with other.lock(name):
                    pass
        async with other.lock(name) as following:
            assert following.fencing_token > lock.fencing_token
        assert not lock.lost.is_set()
        assert lock.is_lost, "it was released"


def cancellations() -> int:
    """The number of cancellations of the current task that were not taken back."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_an_operators_release_is_learnt_at_the_end_of_the_block_of_asyncio(
    shared_proxy: ProxyProcess, name: str
) -> None:
    async with AsyncClient(shared_proxy.url) as client:
        with pytest.raises(LockLost, match="was no longer held when it was released"):
            async with client.lock(name):
                await client.force_release(name)


async def test_a_loss_cancels_the_block_and_nothing_else(
    wire_url: str, set_line: Callable[[bool], None], name: str
) -> None:
    async with AsyncClient(wire_url, retry_seconds_max=0) as client:

        async def work() -> None:
            async with client.lock(name, ttl_seconds=1, on_loss="cancel"):
                set_line(False)
                await asyncio.sleep(60)

        with pytest.raises(LockLost):
            await work()
        assert cancellations() == 0
        await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_one_and_releases_it(shared_proxy: ProxyProcess, name: str) -> None:
    async with AsyncClient(shared_proxy.url) as client:
        held = asyncio.Event()

        async def work() -> None:
            async with client.lock(name, on_loss="cancel"):
                held.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await held.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.get_lock(name))["holders"] == []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), client.lock(name, on_loss="cancel"):
                await asyncio.sleep(60)
        assert (await client.get_lock(name))["holders"] == []


async def test_a_loss_that_the_block_only_waits_for_is_raised_at_its_end(shared_proxy: ProxyProcess, name: str) -> None:
    told: list[AsyncHeldLock] = []
    async with AsyncClient(shared_proxy.url) as client:

        async def work() -> None:
            async with client.lock(name, on_loss=told.append) as lock:
                await client.delete_lock(name)
                with pytest.raises(LockLost):
                    await lock.verify()
                assert lock.is_lost
                async with asyncio.timeout(LOSS_SECONDS):
                    await lock.lost.wait()
                assert told == [lock]

        with pytest.raises(LockLost, match="deleted"):
            await work()


async def test_what_the_block_raises_on_its_cancellation_is_kept(shared_proxy: ProxyProcess, name: str) -> None:
    async with AsyncClient(shared_proxy.url) as client:

        async def work() -> None:
            async with client.lock(name, ttl_seconds=1, on_loss="cancel"):
                await client.force_release(name)
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    raise KeyError from None

        with pytest.raises(KeyError):
            await work()
        assert cancellations() == 0


# ---------------------------------------------------------------- administration


def test_locks_are_made_changed_listed_and_deleted(client: Client, name: str) -> None:
    made = client.put_lock(name, "semaphore", slots=3)
    assert made == {"name": name, "kind": "semaphore", "slots": 3, "enabled": True, "holders": [], "waiting": 0}
    assert client.put_lock(name, "semaphore", enabled=False) == {**made, "enabled": False}
    assert client.get_lock(name) in client.locks()
    with pytest.raises(Conflict):
        client.put_lock(name, "mutex")
    client.delete_lock(name)
    for ask in (client.get_lock, client.delete_lock, client.force_release):
        with pytest.raises(LockNotFound):
            ask(name)


async def test_the_asyncio_client_administers_them_as_well(shared_proxy: ProxyProcess, name: str) -> None:
    async with AsyncClient(shared_proxy.url) as client:
        made = await client.put_lock(name, "persistent_mutex")
        assert await client.get_lock(name) == made
        assert made in await client.locks()
        assert await client.force_release(name, fencing_token=1) == []
        await client.delete_lock(name)
        with pytest.raises(LockNotFound):
            await client.get_lock(name)


# ---------------------------------------------------------------- the page on locks


def test_the_examples_of_the_page_run_as_they_stand(
    shared_proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = PAGE.read_text().partition("## From a thin client\n")[2].partition("## Prove it\n")[0]
    (python,) = re.findall(r"```python\n(.*?)```", rest, flags=re.DOTALL)
    program = [sys.executable, "-W", "error", "-c", python]
    done = subprocess.run(
        program, env={"POPGATE_URL": shared_proxy.url}, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine, slot 1\n", "")
    guarded, administered = re.findall(r"```sh\n(.*?)```", rest, flags=re.DOTALL)
    assert CommandLine(shared_proxy.url).shell(guarded) == (0, "nightly is mine\n", "")
    monkeypatch.setenv("POPGATE_URL", shared_proxy.url)
    for line in administered.splitlines():
        popgate, *arguments = shlex.split(line)
        assert (popgate, run(arguments)) == ("popgate", 0)
    said = capsys.readouterr().err.splitlines()
    assert said == ["popgate: lock licences was not held", "popgate: deleted licences"]
