"""How the models change a value in a tuple: by making another tuple."""

from typing import TypeVar

X = TypeVar("X")


def put(items: tuple[X, ...], index: int, item: X) -> tuple[X, ...]:
    return (*items[:index], item, *items[index + 1 :])


def without(items: tuple[X, ...], index: int) -> tuple[X, ...]:
    return items[:index] + items[index + 1 :]
