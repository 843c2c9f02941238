"""What is wrong with the settings of the history is said before anything runs."""

from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

from distlocks import locks
from distlocks.checks import check_settings, check_stores
from distlocks.conf import params

MEMORY = "distlocks.backends.memory.MemoryBackend"


def entries(**entry: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": MEMORY, **entry}}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"HISTORY_DAYS": -1}, "-1"),
        ({"HISTORY_DAYS": "30"}, "'30'"),
        ({"HISTORY_DAYS": True}, "True"),
        ({"HISTORY_DATABASE": "nowhere"}, "'nowhere'"),
        ({"HISTORY_DATABASE": None}, "None"),
    ],
)
def test_a_wrong_entry(entry: dict[str, Any], named: str) -> None:
    with override_settings(DISTLOCKS=entries(**entry)):
        (message,) = check_settings()
    assert message.id == "distlocks.E060"
    assert named in message.msg
    assert message.hint


@pytest.mark.parametrize(
    ("entry", "kept"),
    [({}, True), ({"HISTORY_DAYS": 0}, False), ({"HISTORY_DAYS": 0.5}, True)],
)
def test_whether_it_is_kept(entry: dict[str, Any], kept: bool) -> None:
    with override_settings(DISTLOCKS=entries(**entry)):
        assert check_settings() == []
        assert locks["default"].recorded is kept


def test_without_a_database_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(settings.DATABASES, "default")
    with override_settings(DISTLOCKS=entries()):
        assert check_settings() == []
        assert not locks["default"].recorded
        assert params("default").history_days == 0


def test_missing_tables(databases: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {**connections["default"].settings_dict, "NAME": str(tmp_path / "bare.sqlite3")}
    monkeypatch.setitem(connections.databases, "bare", bare)
    with connections["bare"].cursor() as cursor:
        cursor.execute("CREATE TABLE somebodys (id integer)")
    with override_settings(DISTLOCKS=entries(HISTORY_DATABASE="bare", GUARD_DATABASES=[])):
        (message,) = check_stores(databases=["bare"])
        assert check_stores(databases=["default"]) == []
    assert message.id == "distlocks.W060"
    assert "--database bare" in (message.hint or "")
    assert "HISTORY_DAYS" in (message.hint or "")
    connections["bare"].close()
    del connections["bare"]
