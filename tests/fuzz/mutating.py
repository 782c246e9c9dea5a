"""Nearly valid bytes: seeded random mutations of valid inputs."""

import random
from collections.abc import Callable, Sequence

LENGTH_MAX = 64 * 1024
"""Maximum length of a mutated input."""
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)
_SIZES = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)


class Mutator:
    """Makes inputs from ``corpus``, which may grow."""

    def __init__(self, chance: random.Random, corpus: Sequence[bytes]) -> None:
        self._chance = chance
        self._corpus = corpus
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._set,
            self._size,
            self._insert,
            self._cut_out,
            self._repeat,
            self._splice,
            self._cut_off,
        )

    def next(self) -> bytes:
        """One input of the corpus, mutated in a few places."""
        data = bytearray(self._chance.choice(self._corpus))
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 8))):
            self._chance.choice(self._ways)(data)
        return bytes(data[:LENGTH_MAX])

    def _place(self, data: bytearray) -> int:
        return self._chance.randrange(len(data) + 1)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._chance.randrange(len(data))] = self._chance.choice(_INTERESTING)

    def _size(self, data: bytearray) -> None:
        """Write a number at a place that may hold a size."""
        at, width = self._place(data), self._chance.choice((1, 2, 4, 8))
        value = self._chance.choice(_SIZES) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "big")

    def _insert(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = self._chance.randbytes(self._chance.choice((1, 2, 4, 16)))

    def _cut_out(self, data: bytearray) -> None:
        at = self._place(data)
        del data[at : at + self._chance.choice((1, 2, 4, 16, 64))]

    def _repeat(self, data: bytearray) -> None:
        """Repeat one part many times: nested data gets deep, lists get long."""
        at = self._place(data)
        part = bytes(data[at : at + self._chance.choice((1, 2, 8, 32))])
        data[at:at] = part * self._chance.choice((1, 4, 64, 1_000))

    def _splice(self, data: bytearray) -> None:
        """Continue with another input."""
        other = self._chance.choice(self._corpus)
        if other:
            data[self._place(data) :] = other[self._chance.randrange(len(other)) :]

    def _cut_off(self, data: bytearray) -> None:
        del data[self._place(data) :]
