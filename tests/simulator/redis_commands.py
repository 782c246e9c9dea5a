"""Redis's commands over a dictionary, as far as popgate's adapters and their scripts use them.

This module owns the effect of each command on the keys and its answer, in Python's types: bytes, int, list, None.
Unused commands are missing. The contract suite of the state's ports checks it against a real Redis.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Word: TypeAlias = bytes
Answer: TypeAlias = Any
"""bytes, int, None, or a list of answers."""


class Keyspace:
    """All keys of one Redis. ``wall``: Unix seconds. ``publish`` is called for each message on a channel."""

    def __init__(self, wall: Callable[[], float], publish: Callable[[bytes, bytes], None]) -> None:
        self._wall = wall
        self._publish = publish
        self._keys: dict[bytes, Any] = {}
        self._commands: dict[bytes, Callable[..., Answer]] = {
            name.removeprefix("do_").upper().encode(): getattr(self, name) for name in dir(self) if name[:3] == "do_"
        }

    def call(self, command: bytes, *words: Word) -> Answer:
        return self._commands[command](*words)

    def wipe(self) -> None:
        """Delete all data."""
        self._keys.clear()

    # -- keys ---------------------------------------------------------------------------------------------------

    def do_ping(self) -> Answer:
        return b"PONG"

    def do_time(self) -> Answer:
        microseconds = round(self._wall() * 1_000_000)
        return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]

    def do_flushdb(self) -> Answer:
        self._keys.clear()
        return b"OK"

    def do_exists(self, key: Word) -> Answer:
        return int(key in self._keys)

    def do_unlink(self, *keys: Word) -> Answer:
        return sum(self._keys.pop(key, None) is not None for key in keys)

    do_del = do_unlink

    def do_publish(self, channel: Word, message: Word) -> Answer:
        self._publish(channel, message)
        return 0

    # -- strings ------------------------------------------------------------------------------------------------

    def do_get(self, key: Word) -> Answer:
        return self._keys.get(key)

    def do_mget(self, *keys: Word) -> Answer:
        return [self._keys.get(key) for key in keys]

    def do_set(self, key: Word, value: Word, only: Word = b"") -> Answer:
        if only == b"NX" and key in self._keys:
            return None
        self._keys[key] = value
        return b"OK"

    def do_setnx(self, key: Word, value: Word) -> Answer:
        return int(self.do_set(key, value, b"NX") is not None)

    def do_incrby(self, key: Word, by: Word) -> Answer:
        value = int(self._keys.get(key, b"0")) + int(by)
        self._keys[key] = b"%d" % value
        return value

    def do_incr(self, key: Word) -> Answer:
        return self.do_incrby(key, b"1")

    # -- hashes -------------------------------------------------------------------------------------------------

    def do_hget(self, key: Word, field: Word) -> Answer:
        return self._keys.get(key, {}).get(field)

    def do_hmget(self, key: Word, *fields: Word) -> Answer:
        found = self._keys.get(key, {})
        return [found.get(field) for field in fields]

    def do_hgetall(self, key: Word) -> Answer:
        return [word for pair in self._keys.get(key, {}).items() for word in pair]

    def do_hvals(self, key: Word) -> Answer:
        return list(self._keys.get(key, {}).values())

    def do_hkeys(self, key: Word) -> Answer:
        return list(self._keys.get(key, {}))

    def do_hlen(self, key: Word) -> Answer:
        return len(self._keys.get(key, {}))

    def do_hexists(self, key: Word, field: Word) -> Answer:
        return int(field in self._keys.get(key, {}))

    def do_hset(self, key: Word, *pairs: Word) -> Answer:
        fields = self._keys.setdefault(key, {})
        before = len(fields)
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def do_hsetnx(self, key: Word, field: Word, value: Word) -> Answer:
        return 0 if field in self._keys.get(key, {}) else self.do_hset(key, field, value)

    def do_hdel(self, key: Word, *names: Word) -> Answer:
        return self._taken_out(key, names)

    def do_hscan(self, key: Word, cursor: Word, *options: Word) -> Answer:
        """Return everything at once, as Redis does for small hashes."""
        return [b"0", self.do_hgetall(key)]

    # -- lists --------------------------------------------------------------------------------------------------

    def do_rpush(self, key: Word, *values: Word) -> Answer:
        items = self._keys.setdefault(key, [])
        items += values
        return len(items)

    def do_llen(self, key: Word) -> Answer:
        return len(self._keys.get(key, ()))

    def do_lrange(self, key: Word, first: Word, last: Word) -> Answer:
        items: list[bytes] = self._keys.get(key, [])
        return items[_span(first, last, len(items))]

    def do_ltrim(self, key: Word, first: Word, last: Word) -> Answer:
        items: list[bytes] = self._keys.get(key, [])
        items[:] = items[_span(first, last, len(items))]
        if not items:
            self._keys.pop(key, None)
        return b"OK"

    # -- sets, plain and sorted -----------------------------------------------------------------------------------

    def do_sadd(self, key: Word, *members: Word) -> Answer:
        found = self._keys.setdefault(key, {})
        before = len(found)
        found.update(dict.fromkeys(members, b""))
        return len(found) - before

    def do_srem(self, key: Word, *members: Word) -> Answer:
        return self._taken_out(key, members)

    def do_smembers(self, key: Word) -> Answer:
        return list(self._keys.get(key, {}))

    def do_zadd(self, key: Word, *pairs: Word) -> Answer:
        found = self._keys.setdefault(key, {})
        before = len(found)
        found.update((member, float(score)) for score, member in zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def do_zrem(self, key: Word, *members: Word) -> Answer:
        return self._taken_out(key, members)

    def do_zscore(self, key: Word, member: Word) -> Answer:
        score = self._keys.get(key, {}).get(member)
        return None if score is None else _written(score)

    def do_zrangebyscore(self, key: Word, least: Word, most: Word, *limit: Word) -> Answer:
        found = self._within(key, least, most)
        if limit:
            _, offset, count = limit
            found = found[int(offset) : int(offset) + int(count)]
        return found

    def do_zcount(self, key: Word, least: Word, most: Word) -> Answer:
        return len(self._within(key, least, most))

    def do_zremrangebyscore(self, key: Word, least: Word, most: Word) -> Answer:
        return self._taken_out(key, self._within(key, least, most))

    def do_zrevrange(self, key: Word, first: Word, last: Word, *options: Word) -> Answer:
        found = self._by_score(key)[::-1]
        return [word for score, member in found[_span(first, last, len(found))] for word in (member, _written(score))]

    def _within(self, key: Word, least: Word, most: Word) -> list[bytes]:
        (lowest, above), (highest, below) = _bound(least), _bound(most)
        return [
            member
            for score, member in self._by_score(key)
            if lowest <= score <= highest and not (above and score == lowest) and not (below and score == highest)
        ]

    def _by_score(self, key: Word) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self._keys.get(key, {}).items())

    def _taken_out(self, key: Word, names: Sequence[Word]) -> int:
        found = self._keys.get(key, {})
        gone = sum(found.pop(name, None) is not None for name in names)
        if not found:
            self._keys.pop(key, None)
        return gone


def _span(first: bytes, last: bytes, length: int) -> slice:
    start, end = int(first), int(last)
    return slice(max(0, start + length) if start < 0 else start, (end + length if end < 0 else end) + 1)


def _bound(word: bytes) -> tuple[float, bool]:
    """Return a score, and whether it is excluded from the range."""
    return float(word.removeprefix(b"(")), word.startswith(b"(")


def _written(score: float) -> bytes:
    return b"%.17g" % score
