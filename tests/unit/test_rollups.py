"""What is counted before it is written."""

from distlocks.histogram import bucket
from distlocks.history import rollups
from distlocks.history.rollups import HOUR, MINUTE, TOTAL, CellKey, Cells, Tally
from distlocks.patterns import OTHERS

NOW = 1_800_000_065.5
ITS_MINUTE, ITS_HOUR = 1_800_000_060, 1_800_000_000


def taken(cells: Cells) -> dict[CellKey, rollups.Cell]:
    return dict(cells.take())


def test_a_grant_counts_in_its_minute_and_hour_for_its_pattern_and_for_all() -> None:
    cells = Cells()
    cells.granted("default", "order:*", NOW, Tally(0.03))
    cells.released("default", "order:*", NOW, Tally(2.0))
    found = taken(cells)
    assert set(found) == {
        CellKey("default", began, span, pattern)
        for began, span in ((ITS_MINUTE, MINUTE), (ITS_HOUR, HOUR))
        for pattern in ("order:*", TOTAL)
    }
    for cell in found.values():
        assert cell.counts["acquired"] == 1
        assert cell.waited[bucket(0.03)] == 1
        assert cell.held[bucket(2.0)] == 1
        assert (cell.wait_seconds, cell.hold_seconds) == (0.03, 2.0)
    assert cells.take() == []


def test_what_could_not_be_written_is_added_to_what_has_come_since() -> None:
    cells = Cells()
    cells.count("lost", "default", "a", NOW)
    cells.granted("default", "a", NOW, Tally(0.0))
    unwritten = cells.take()
    cells.count("lost", "default", "a", NOW)
    cells.put_back(unwritten)
    for cell in taken(cells).values():
        assert cell.counts["lost"] == 2
        assert cell.counts["acquired"] == 1


def test_too_many_patterns_are_not_told_apart() -> None:
    cells = Cells()
    for number in range(rollups.MAX_PATTERNS + 50):
        cells.count("contended", "default", f"pattern {number}", NOW)
    found = {key.pattern: cell for key, cell in cells.take() if key.span == HOUR}
    assert len(found) == rollups.MAX_PATTERNS + 2
    assert found[OTHERS].counts["contended"] == 50
    assert found[TOTAL].counts["contended"] == rollups.MAX_PATTERNS + 50
    # The next hours are other hours.
    cells.count("contended", "default", "new", NOW + HOUR)
    assert "new" in {key.pattern for key, _ in cells.take()}


def test_memory_is_bounded(monkeypatch: object) -> None:
    cells = Cells()
    for minute in range(rollups.MAX_CELLS):
        cells.count("contended", "default", "a", NOW + minute * MINUTE)
    assert len(cells) <= rollups.MAX_CELLS
    assert cells.dropped
