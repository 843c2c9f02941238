"""Circles of waiters."""

import pytest

from distlocks.history.cycles import circles


@pytest.mark.parametrize(
    ("waits_for", "found"),
    [
        ({}, []),
        ({"a": {"b"}}, []),
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"a"}}, [("a",)]),
        ({"b": {"a"}, "a": {"b"}}, [("a", "b")]),
        ({"c": {"a"}, "a": {"b"}, "b": {"c"}}, [("a", "b", "c")]),
        # Who waits for one in a circle is in none.
        ({"z": {"a"}, "a": {"b"}, "b": {"a"}}, [("a", "b")]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [("a", "b"), ("c", "d")]),
        # The shorter one through each.
        ({"a": {"b"}, "b": {"a", "c"}, "c": {"a"}}, [("a", "b"), ("a", "b", "c")]),
    ],
)
def test_circles(waits_for: dict[str, set[str]], found: list[tuple[str, ...]]) -> None:
    assert circles(waits_for) == found
