"""Who waits for each other in a circle. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping


def circles(waits_for: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """The circles in a graph of waiters, each of whom waits for what some others hold.

    Through each waiter that is in one, the shortest; each once, its smallest name first.
    """
    found = {circle for start in waits_for if (circle := _shortest(start, waits_for)) is not None}
    return sorted(found)


def _shortest(start: str, waits_for: Mapping[str, Iterable[str]]) -> tuple[str, ...] | None:
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for there in sorted(waits_for.get(here, ())):
            if there == start:
                path = [here]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                path.reverse()
                smallest = path.index(min(path))
                return tuple(path[smallest:] + path[:smallest])
            if there in waits_for and there not in came_from:
                came_from[there] = here
                queue.append(there)
    return None
