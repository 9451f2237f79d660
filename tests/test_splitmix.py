"""SplitMix64 against the published numbers."""

from __future__ import annotations

import numpy as np

from routepack_opt.splitmix import GOLDEN, mix, next_number


def by_definition(state: int) -> int:
    """The output function in Python integers."""
    mask = 2**64 - 1
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_numbers_are_those_of_the_definition() -> None:
    state = np.array([1234567], dtype=np.uint64)
    counter = 1234567
    for _ in range(50):
        counter = (counter + GOLDEN) % 2**64
        expected = by_definition(counter)
        assert int(next_number(state)) == expected
        assert int(mix(np.uint64(counter))) == expected
    assert int(state[0]) == counter


def test_the_first_numbers_of_a_known_seed() -> None:
    state = np.array([1234567], dtype=np.uint64)
    assert [int(next_number(state)) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
