"""The keys of an OpenID provider: when they are fetched, how long they are valid, and what a failed fetch changes."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

import pytest
import pytest_asyncio
from joserfc.jwk import OKPKey

from popgate.auth.key_set import ProviderKey
from popgate.auth.provider_client import FETCH_SECONDS, ProviderError
from popgate.auth.provider_keys import (
    FETCHES_MAX,
    KEEP_SECONDS,
    RENEW_SECONDS,
    RETRY_SECONDS_MAX,
    UNKNOWN_KEY_SECONDS,
    WITHDRAWN_MAX,
    ProviderKeys,
    pause_seconds,
)
from popgate.domain.errors import RetryLater
from popgate.runtime.clocks import ManualClock

SOON_SECONDS = 5


def jwk(id: str) -> dict[str, object]:
    return {**OKPKey.generate_key("Ed25519").as_dict(private=False), "kid": id}


class Provider:
    """A provider that publishes ``keys``, unless ``failure`` is set. It answers only while ``gate`` is set."""

    def __init__(self) -> None:
        self.keys: list[dict[str, object]] = [jwk("a")]
        self.failure: Exception | None = None
        self.content: bytes | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.began = self.running = self.running_max = 0
        self.fetched = asyncio.Semaphore(0)
        self.clock = ManualClock()
        self.known = ProviderKeys(self.fetch, clock=self.clock, chance=random.Random(1))

    async def fetch(self) -> bytes:
        self.began += 1
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            return json.dumps({"keys": self.keys}).encode() if self.content is None else self.content
        finally:
            self.running -= 1
            self.fetched.release()

    async def key(self, id: str) -> ProviderKey | None:
        return await in_time(self.known.key(id, "EdDSA"))

    async def renewed(self) -> None:
        """Wait for a fetch that has not begun yet."""
        self.fetched = asyncio.Semaphore(0)
        async with asyncio.timeout(SOON_SECONDS):
            await self.fetched.acquire()

    async def fetched_again(self) -> None:
        """Let a token with an unknown key cause a fetch."""
        self.clock.advance(UNKNOWN_KEY_SECONDS)
        with suppress(RetryLater):
            assert await self.key("unknown") is None


async def in_time(work: Awaitable[ProviderKey | None]) -> ProviderKey | None:
    async with asyncio.timeout(SOON_SECONDS):
        return await work


@pytest_asyncio.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    task = asyncio.create_task(provider.known.run(), name="keys")
    yield provider
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_first_token_waits_for_the_keys(provider: Provider) -> None:
    assert await provider.key("a") is not None
    assert await provider.known.key("a", "RS256") is None
    assert provider.known.version == 0


async def test_any_number_of_tokens_with_unknown_keys_causes_one_fetch_in_some_seconds(provider: Provider) -> None:
    await provider.key("a")
    assert await provider.known.key("a", "RS256") is None
    began = provider.began
    for _ in range(3):
        assert [await provider.key(f"x{number}") for number in range(100)] == [None] * 100
        provider.clock.advance(UNKNOWN_KEY_SECONDS - 0.1)
        assert await provider.key("y") is None
        provider.clock.advance(0.1)
        assert provider.began == began
        assert await provider.key("z") is None
        began += 1
        assert provider.began == began


async def test_tokens_share_a_fetch_and_known_keys_do_not_wait_for_it(provider: Provider) -> None:
    known = await provider.key("a")
    provider.clock.advance(UNKNOWN_KEY_SECONDS)
    provider.gate.clear()
    provider.keys.append(jwk("b"))
    waiting = [asyncio.ensure_future(provider.key(id)) for id in ("b", "c") * 50]
    await asyncio.sleep(0.05)
    assert not any(one.done() for one in waiting)
    assert await provider.key("a") is known
    provider.gate.set()
    found = await asyncio.gather(*waiting)
    assert [one is not None for one in found] == [True, False] * 50
    assert provider.running_max == 1
    assert provider.began == 2


async def test_keys_are_renewed_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.RENEW_SECONDS", 0.01)
    provider = Provider()
    task = asyncio.create_task(provider.known.run(), name="keys")
    try:
        assert await provider.key("a") is not None
        provider.keys = [jwk("b")]
        provider.fetched = asyncio.Semaphore(0)
        async with asyncio.timeout(SOON_SECONDS):
            for _ in range(3):
                await provider.fetched.acquire()
    finally:
        task.cancel()
    assert await provider.key("b") is not None
    assert provider.known.version == 1


async def test_a_token_does_not_wait_for_fetch_after_fetch(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.UNKNOWN_KEY_SECONDS", 0.0)  # as if each fetch took very long
    await provider.key("a")
    assert await provider.key("b") is None
    assert provider.began == 1 + FETCHES_MAX


def test_pauses_have_jitter_and_grow_with_failures() -> None:
    chance = random.Random(1)
    pauses = {pause_seconds(0, chance) for _ in range(50)}
    assert len(pauses) == 50
    assert all(0.8 * RENEW_SECONDS <= pause <= RENEW_SECONDS - FETCH_SECONDS for pause in pauses)
    for failures, longest in ((1, 2.0), (2, 4.0), (10, RETRY_SECONDS_MAX), (10_000, RETRY_SECONDS_MAX)):
        assert all(longest / 2 <= pause_seconds(failures, chance) <= longest for _ in range(50))


async def test_without_keys_clients_are_asked_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.RETRY_SECONDS_MAX", 0.05)
    provider = Provider()
    provider.failure = ProviderError("down")
    task = asyncio.create_task(provider.known.run(), name="keys")
    try:
        for _ in range(3):
            with pytest.raises(RetryLater) as raised:
                await provider.key("a")
            assert raised.value.retry_after_seconds >= 1
        assert provider.began <= 2
        provider.failure = None
        await provider.renewed()
        assert await provider.key("a") is not None
    finally:
        task.cancel()


async def test_while_the_provider_fails_tokens_neither_wait_nor_cause_fetches(provider: Provider) -> None:
    known = await provider.key("a")
    provider.failure = ProviderError("down")
    await provider.fetched_again()
    began = provider.began
    for _ in range(10):
        await provider.fetched_again()
    assert provider.began == began
    assert await provider.key("a") is known


async def test_a_bounded_number_of_tokens_waits_for_the_provider(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.WAITING_MAX", 3)
    await provider.key("a")
    provider.clock.advance(UNKNOWN_KEY_SECONDS)
    provider.gate.clear()
    waiting = [asyncio.ensure_future(provider.key("b")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RetryLater):
        await provider.key("c")
    provider.gate.set()
    assert await asyncio.gather(*waiting) == [None] * 3
    assert await provider.key("c") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"<html>"])
async def test_an_answer_that_is_no_set_of_keys_keeps_the_known_ones(provider: Provider, content: bytes) -> None:
    known = await provider.key("a")
    provider.content = content
    await provider.fetched_again()
    assert await provider.key("a") is known
    with pytest.raises(RetryLater):
        await provider.key("b")


async def test_keys_remain_valid_for_a_day_while_the_provider_is_down(
    provider: Provider, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.RETRY_SECONDS_MAX", 0.05)
    known = await provider.key("a")
    provider.failure = ProviderError("down")
    await provider.fetched_again()
    for _ in range(4):
        await provider.renewed()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    provider.clock.advance(KEEP_SECONDS - 2 * UNKNOWN_KEY_SECONDS)
    assert await provider.key("a") is known
    assert provider.known.version == 0
    provider.clock.advance(2 * UNKNOWN_KEY_SECONDS)
    with pytest.raises(RetryLater):
        await provider.key("a")
    assert provider.known.version == 1
    provider.failure = None
    await provider.renewed()
    assert await provider.key("a") == known


async def test_a_provider_can_withdraw_all_keys(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    known = await provider.key("a")
    assert known is not None
    provider.keys = []
    await provider.fetched_again()
    assert await provider.key("a") is None
    assert provider.known.is_withdrawn(known.thumbprint)
    assert provider.known.version == 1
    assert "no key that popgate can use" in caplog.text


async def test_a_new_key_changes_no_earlier_answer(provider: Provider) -> None:
    await provider.key("a")
    provider.keys.append(jwk("b"))
    await provider.fetched_again()
    assert await provider.key("b") is not None
    assert provider.known.version == 0


async def test_a_key_with_another_id_is_not_withdrawn_but_its_tokens_are_checked_again(provider: Provider) -> None:
    known = await provider.key("a")
    assert known is not None
    provider.keys = [{**provider.keys[0], "kid": "b"}]
    await provider.fetched_again()
    assert await provider.key("b") == known
    assert await provider.key("a") is None
    assert provider.known.version == 1
    assert not provider.known.is_withdrawn(known.thumbprint)


async def test_a_bounded_number_of_withdrawn_keys_is_remembered(provider: Provider) -> None:
    thumbprints: list[str] = []
    for _ in range(WITHDRAWN_MAX + 3):
        key = await provider.key("a")
        assert key is not None
        thumbprints.append(key.thumbprint)
        provider.keys = [jwk("a")]
        await provider.fetched_again()
    assert [provider.known.is_withdrawn(one) for one in thumbprints] == [False] * 3 + [True] * WITHDRAWN_MAX


async def test_a_token_does_not_wait_longer_than_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popgate.auth.provider_keys.WAIT_SECONDS", 0.05)
    provider = Provider()
    with pytest.raises(RetryLater):
        await provider.key("a")
