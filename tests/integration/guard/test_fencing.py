"""fenced_update(): single writes that an old token cannot make, and what they do not cover."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.db.models import F

from distlocks import LeaseLost, StaleToken
from distlocks.fencing import fenced_update
from tests.integration.guard.sites import Site, forged, now_us, statements
from tests.testapp.models import Account, Report


@pytest.fixture
def report(database: Site, key: str) -> Report:
    return Report.objects.using(database.using).create(name=key, text="begun")


def stored(report: Report) -> Report:
    """The row as others see it."""
    return Report.objects.using(report._state.db).get(pk=report.pk)


class TestARow:
    def test_it_is_written_and_the_instance_brought_up_to_date(
        self, database: Site, report: Report, key: str
    ) -> None:
        with database.lock(key) as lease:
            assert fenced_update(lease, report, text="done", views=3) == 1
        assert (report.text, report.views) == ("done", 3)
        assert report.fencing_token == lease.fencing_token
        assert (stored(report).text, stored(report).views) == ("done", 3)
        assert stored(report).fencing_token == lease.fencing_token

    def test_one_conditional_update_and_no_transaction(
        self, database: Site, report: Report, key: str
    ) -> None:
        with database.queries() as captured:
            fenced_update(forged(key, token=now_us()), report, text="done")
        assert statements(captured) == ["UPDATE", "SELECT"]
        assert not connections[database.using].in_atomic_block

    def test_a_stale_holder_is_refused(self, report: Report, key: str) -> None:
        old, new = forged(key, token=now_us()), forged(key, token=now_us() + 1)
        fenced_update(new, report, text="the later one's")
        with pytest.raises(StaleToken) as caught:
            fenced_update(old, report, text="the earlier one's")
        assert caught.value.keys == (key,)
        assert stored(report).text == "the later one's"
        assert report.text == "the later one's", "the instance shows nothing that is not stored"

    def test_a_holder_may_write_again(self, report: Report, key: str) -> None:
        lease = forged(key, token=now_us())
        fenced_update(lease, report, text="first")
        fenced_update(lease, report, text="second")
        assert stored(report).text == "second"

    def test_an_instance_that_is_older_than_the_row_is_no_obstacle(
        self, report: Report, key: str
    ) -> None:
        lease = forged(key, token=now_us())
        fenced_update(lease, stored(report), text="first")
        fenced_update(lease, report, text="second")
        assert stored(report).text == "second"

    def test_f_expressions_count_each_accepted_call_once(self, report: Report, key: str) -> None:
        stale, lease = forged(key, token=now_us()), forged(key, token=now_us() + 1)
        for _ in range(3):
            fenced_update(lease, report, views=F("views") + 1)
        with pytest.raises(StaleToken):
            fenced_update(stale, report, views=F("views") + 1)
        assert report.views == 3, "the instance has the value, not the expression"
        assert stored(report).views == 3

    def test_a_deleted_row_is_refused(self, report: Report, key: str) -> None:
        stored(report).delete()
        with pytest.raises(StaleToken, match="deleted"):
            fenced_update(forged(key, token=now_us()), report, text="done")

    def test_a_lost_lease_writes_nothing(self, report: Report, key: str) -> None:
        with pytest.raises(LeaseLost):
            fenced_update(forged(key, token=now_us(), ttl=2, age=10), report, text="done")
        assert stored(report).text == "begun"


class TestAQueryset:
    def test_rows_with_a_higher_token_are_left_out(self, database: Site, key: str) -> None:
        lease, later = forged(key, token=now_us()), forged(key, token=now_us() + 1)
        reports = [Report.objects.using(database.using).create(name=f"{key}:{i}") for i in range(3)]
        fenced_update(later, reports[0], text="the later one's")
        every = Report.objects.using(database.using).filter(name__startswith=key)
        assert fenced_update(lease, every, text="done", views=F("views") + 1) == 2
        assert [(stored(r).text, stored(r).views) for r in reports] == [
            ("the later one's", 0),
            ("done", 1),
            ("done", 1),
        ]

    def test_none_is_no_error(self, database: Site, key: str) -> None:
        none = Report.objects.using(database.using).filter(name=key)
        assert fenced_update(forged(key, token=now_us()), none, text="done") == 0


class TestRefused:
    def test_a_lease_of_several_keys(self, report: Report, key: str) -> None:
        """Which token would the row remember?"""
        lease = forged(f"{key}:1", f"{key}:2", token=(now_us(), now_us()))
        with pytest.raises(ValueError, match="2 keys"):
            fenced_update(lease, report, text="done")
        assert stored(report).text == "begun"

    @pytest.mark.parametrize("target", [lambda account: account, lambda _: Account.objects.all()])
    def test_a_model_that_remembers_no_token(
        self, production: None, key: str, target: Callable[[Account], Any]
    ) -> None:
        account = Account.objects.create(name=key)
        with pytest.raises(TypeError, match=r"Account must inherit from .*FencedModel"):
            fenced_update(forged(key, token=now_us()), target(account), balance=1)


class TestNotCovered:
    """What the documentation says one must not use it for."""

    def test_read_modify_write_loses_an_update(self, report: Report, key: str) -> None:
        old, new = forged(key, token=now_us()), forged(key, token=now_us() + 1)
        read_by_old, read_by_new = stored(report).views, stored(report).views
        assert fenced_update(old, report, views=read_by_old + 1) == 1
        assert fenced_update(new, report, views=read_by_new + 1) == 1
        assert stored(report).views == 1

    def test_a_plain_save_goes_past_it(self, report: Report, key: str) -> None:
        fenced_update(forged(key, token=now_us()), stored(report), text="the holder's")
        report.text = "somebody's"
        report.save(update_fields=["text"])
        assert stored(report).text == "somebody's"
