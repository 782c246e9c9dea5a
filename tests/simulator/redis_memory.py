"""A Redis in this process: the adapter's unmodified scripts, run by LuaJIT (Lua 5.1, as in Redis), each atomically.

This module owns how a command gets its answer. The production adapter above it is unchanged, except that its
connection, the ``PipelinedConnection``, is replaced.
"""

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, cast

import orjson
from lupa.luajit21 import LuaRuntime, lua_type  # type: ignore[import-untyped]  # it has no types
from redis.exceptions import NoScriptError, ResponseError

from popgate.adapters.redis.pipelined_connection import Word
from simulator.redis_commands import Answer, Keyspace

_BEFORE = """
local call, from_json = ...
cjson = { decode = from_json }
redis = {
  call = call,
  error_reply = function(text) return { err = text } end,
  status_reply = function(text) return { ok = text } end,
}
KEYS = {}
return function(script, ...)
  ARGV = { ... }
  return script()
end
"""


class MemoryRedis:
    """One Redis and its data. ``wall``: its clock, in Unix seconds. ``publish``: as for ``Keyspace``."""

    def __init__(
        self, wall: Callable[[], float], publish: Callable[[bytes, bytes], None] = lambda channel, message: None
    ) -> None:
        self.data = Keyspace(wall, publish)
        self._known: dict[bytes, bytes] = {}

    def restart(self, *, keeps_data: bool) -> None:
        """Forget the scripts, and the data if it is not persistent."""
        self._known.clear()
        if not keeps_data:
            self.data.wipe()

    def do(self, *words: Word) -> Answer:
        """Run a command and return its answer. Raises: NoScriptError, ResponseError."""
        name, *arguments = (word if isinstance(word, bytes) else str(word).encode() for word in words)
        if name == b"EVALSHA":
            text = self._known.get(arguments[0])
            if text is None:
                raise NoScriptError("NOSCRIPT No matching script. Please use EVAL.")
            return self._run(text, arguments[2:])
        if name == b"EVAL":
            self._known[sha1(arguments[0], usedforsecurity=False).hexdigest().encode()] = arguments[0]
            return self._run(arguments[0], arguments[2:])
        return self.data.call(name, *arguments)

    def _run(self, text: bytes, arguments: list[bytes]) -> Answer:
        answer = _lua().run(self.data, text, arguments)
        if lua_type(answer) == "table":
            raise ResponseError(answer[b"err"].decode())
        return answer


class _Lua:
    """One interpreter for all: scripts keep no state between two runs. ``data`` belongs to the running script."""

    def __init__(self) -> None:
        runtime: Any = LuaRuntime
        self._lua: Any = runtime(encoding=None, unpack_returned_tuples=False)
        self._data: Keyspace | None = None
        self._scripts: dict[bytes, Any] = {}
        self._lua.execute(Path(__file__).with_name("cmsgpack.lua").read_bytes())
        self._table_from = self._lua.table_from
        self._start = self._lua.execute(_BEFORE.encode(), self._call, self._from_json)

    def run(self, data: Keyspace, text: bytes, arguments: list[bytes]) -> Any:
        script = self._scripts.get(text)
        if script is None:
            script = self._scripts[text] = self._lua.compile(text)
        self._data = data
        return self._start(script, *arguments)

    def _call(self, command: bytes, *words: bytes | float) -> Any:
        assert self._data is not None
        answer = self._data.call(command, *[word if isinstance(word, bytes) else _written(word) for word in words])
        return self._given(answer)

    def _from_json(self, text: bytes) -> Any:
        return self._table(orjson.loads(text))

    def _table(self, value: Any) -> Any:
        if isinstance(value, list):
            return self._table_from([self._table(one) for one in cast("Sequence[Any]", value)])
        return value.encode() if isinstance(value, str) else value

    def _given(self, answer: Answer) -> Any:
        """Convert a value as scripts receive it: a missing one is false."""
        if type(answer) is list:
            items = cast("Sequence[Any]", answer)
            given = [False if one is None else self._given(one) if type(one) is list else one for one in items]
            return self._table_from(given)
        return False if answer is None else answer


def _written(number: float) -> bytes:
    """Format a Lua number as Redis does."""
    return b"%d" % number if number == int(number) else b"%.17g" % number


@cache
def _lua() -> _Lua:
    return _Lua()
