"""The checker itself, on journals that are written by hand: one promise broken in each."""

from itertools import chain
from typing import Any

import pytest

from tests.integration.rig.checker import Event, Hold, Report, check
from tests.integration.rig.observer import Version, check_versions

TTL = 10.0


def us(seconds: float) -> int:
    return round(seconds * 1_000_000)


def events(*journals: list[Event]) -> list[Event]:
    """Journals of processes that have all ended in order."""
    names = {event["who"] for event in chain(*journals)} - {"conductor"}
    ends = [{"event": word, "who": name} for name in names for word in ("started", "stopped")]
    return [*chain(*journals), *ends]


def lease(
    who: str,
    since: float,
    until: float | None,
    *,
    token: int | None = None,
    asked: float | None = None,
    **end: Any,
) -> list[Event]:
    """One lease, by clocks that agree; `until` None: its holder never came to release it."""
    owner = f"{who}-{since}"
    found: list[Event] = [
        {"event": "ask", "at": since if asked is None else asked, "keys": ["k"]},
        {
            "event": "grant",
            "at": since,
            "granted_us": us(since),
            "tokens": {"k": us(since) if token is None else token},
            "owner": owner,
            "ttl": TTL,
            "deadline": since + TTL,
        },
    ]
    if until is not None:
        found.append(
            {
                "event": "end",
                "at": until,
                "keys": ["k"],
                "owner": owner,
                "server_us": us(until),
                "read_at": until,
                "released_us": us(until),
                "deadline": since + TTL,
                "ours": until < since + TTL,
                **end,
            }
        )
    return [event | {"who": who} for event in found]


def killed(who: str, at: float) -> list[Event]:
    return [
        {
            "event": "killed",
            "who": "conductor",
            "victim": who,
            "at": at,
            "after": at,
            "before_us": us(at),
        }
    ]


def changed(who: str, read: int, covered: bool = True) -> list[Event]:
    return [{"event": "changed", "who": who, "key": "k", "read": read, "covered": covered}]


def slept(who: str, since: float, until: float) -> list[Event]:
    return [{"event": "slept", "who": who, "key": "k", "from_us": us(since), "to_us": us(until)}]


def test_leases_one_after_the_other_are_right() -> None:
    report = check(
        events(lease("a", 1, 2), lease("b", 2, 5), lease("a", 6, 20), lease("b", 16, 17))
    )
    assert not report.violations, report
    assert report.counts["grants"] == 4


@pytest.mark.parametrize("token", [us(1), us(1) - 1])
def test_a_token_that_does_not_grow(token: int) -> None:
    report = check(events(lease("a", 1, 2), lease("b", 3, 4, token=token)))
    assert report.rules() == {"token"}


def test_two_at_once() -> None:
    report = check(events(lease("a", 1, 3), lease("b", 2, 4)))
    assert report.rules() == {"exclusion"}
    # On either clock.
    assert len(report.violations) == 2


def test_one_within_the_other() -> None:
    report = check(events(lease("a", 1, 8), lease("b", 2, 3), lease("c", 4, 5)))
    assert len(report.violations) == 4


def test_a_lease_past_its_deadline_excludes_nobody() -> None:
    assert not check(events(lease("a", 1, 15), lease("b", 11, 12))).violations


def test_a_lease_lost_before_its_deadline() -> None:
    assert check(events(lease("a", 1, 3, ours=False))).rules() == {"early loss"}


def test_a_killed_holders_lock_goes_to_the_waiter_in_time() -> None:
    assert not check(
        events(lease("b", 14, 15, asked=3))
        + lease("a", 2, None)
        + killed("a", 4)
        + [{"event": "started", "who": "a"}]
    ).violations


def test_a_killed_holders_lock_that_a_waiter_gets_too_late() -> None:
    journals = events(lease("b", 15.1, 16, asked=3)) + lease("a", 2, None) + killed("a", 4)
    assert check(journals).rules() == {"late takeover"}


def test_a_killed_holders_lock_that_a_waiter_never_gets() -> None:
    ask = {"event": "ask", "who": "b", "at": 3, "keys": ["k"]}
    given_up = {"event": "denied", "who": "b", "at": 18, "keys": ["k"]}
    journals = events([ask, given_up]) + lease("a", 2, None) + killed("a", 4)
    assert check(journals).rules() == {"late takeover"}


def test_a_killed_holder_trusts_nothing_any_more() -> None:
    journals = lease("a", 2, None) + killed("a", 4) + events(lease("b", 5, 6))
    assert not check(journals).violations


def test_a_paused_holder_that_does_not_notice() -> None:
    paused = {"event": "paused", "who": "conductor", "victim": "a", "at": 3}
    journals = events(lease("a", 2, 14, ours=True), [paused])
    assert check(journals).rules() == {"unaware"}
    journals = events(lease("a", 2, 14, ours=False), [paused])
    assert not check(journals).violations


def test_a_sleeper_that_nobody_wakes() -> None:
    late = events(lease("a", 1, 2), slept("b", 1.5, 3.1))
    assert check(late).rules() == {"late wake-up"}
    in_time = events(lease("a", 1, 2), slept("b", 1.5, 2.9))
    assert not check(in_time).violations
    assert check(in_time).counts["woken"] == 1
    past_it = events(lease("a", 1, 2), slept("b", 2.1, 5))
    assert not check(past_it).violations


def test_a_lost_update() -> None:
    fine = events(changed("a", 0), changed("b", 1))
    assert not check(fine, {"k": 2}).violations
    assert check(fine, {"k": 1}).rules() == {"lost update"}
    twice = events(changed("a", 0), changed("b", 0))
    assert check(twice, {"k": 2}).rules() == {"lost update"}


def test_an_update_that_no_lease_covered_proves_nothing() -> None:
    report = check(events(changed("a", 0), changed("b", 0, covered=False)), {"k": 1})
    assert not report.violations
    assert report.counts["uncovered accounts"] == 1


def test_a_process_that_vanished() -> None:
    assert check([{"event": "started", "who": "a"}]).rules() == {"ended"}


class TestLog:
    """What the server's log shows of one row."""

    def granted(self, owner: str, token: int, acquired: float, expires: float) -> Version:
        return Version("k", us(acquired), False, owner, token, us(acquired), us(expires))

    def freed(self, token: int, at: float) -> Version:
        return Version("k", us(at), token=token)

    def check(self, *versions: Version, holds: tuple[Hold, ...] = ()) -> Report:
        return check_versions(versions, holds)

    def hold(self, until: float) -> Hold:
        return Hold("w", "k", 1, "a", TTL, 1.0, us(1), 11.0, until_us=us(until))

    def test_right(self) -> None:
        report = self.check(
            self.granted("a", 1, 1, 11),
            self.granted("a", 1, 1, 14),
            self.freed(1, 5),
            self.granted("b", 2, 5, 15),
            self.granted("c", 3, 15, 25),
            self.freed(4, 26),
            Version("k", us(99), deleted=True),
            self.granted("a", 5, 99, 109),
            holds=(self.hold(5),),
        )
        assert not report.violations, report
        assert report.counts == {"grants": 4, "extensions": 1, "releases": 2, "deletions": 1}

    def test_a_token_that_does_not_grow(self) -> None:
        a = self.granted("a", 7, 1, 11)
        assert self.check(a, self.freed(7, 2), self.granted("b", 7, 3, 13)).rules() == {"token"}
        assert self.check(a, self.freed(6, 2)).rules() == {"token"}

    def test_a_token_that_comes_back_lower_after_a_deletion(self) -> None:
        report = self.check(
            self.granted("a", 7, 1, 11),
            self.freed(7, 2),
            Version("k", us(3), deleted=True),
            self.granted("b", 6, 4, 14),
        )
        assert report.rules() == {"token"}

    def test_a_live_row_taken(self) -> None:
        report = self.check(self.granted("a", 1, 1, 11), self.granted("b", 2, 10.9, 20.9))
        assert report.rules() == {"exclusion"}

    def test_a_live_row_deleted(self) -> None:
        report = self.check(self.granted("a", 1, 1, 11), Version("k", us(10), deleted=True))
        assert report.rules() == {"exclusion"}

    def test_a_lease_extended_after_its_end(self) -> None:
        dead = (self.granted("a", 1, 1, 11), self.granted("a", 1, 1, 21.5))
        assert self.check(*dead, holds=(self.hold(5),)).rules() == {"exclusion"}

    def test_a_lease_trusted_for_longer_than_the_store_kept_it(self) -> None:
        report = self.check(self.granted("a", 1, 1, 11), holds=(self.hold(11.5),))
        assert report.rules() == {"outlived"}

    def test_a_lease_that_the_store_never_gave(self) -> None:
        assert self.check(holds=(self.hold(5),)).rules() == {"unseen"}
