"""What one server of a Redlock grants and refuses, script by script.

Most rules protect from what happens on few servers only, and rarely: a majority hides it when one
of them is broken.
"""

import pytest

from distlocks.backends.redlock import RedlockBackend
from tests.integration.redlock.conftest import TTL, Make
from tests.integration.redlock.one_server import LOW, SECOND, OneServer
from tests.servers.redis_groups import IndependentGroup
from tests.waiting import eventually

# After so long, the record of a claim that has ended may go.
LONG_AGO = 60 * SECOND
# Ahead of the clock, so that no time that a server puts in by itself is as high.
HIGH = 600 * SECOND


@pytest.fixture
def backend(make: Make) -> RedlockBackend:
    return make()


@pytest.fixture
def server(backend: RedlockBackend) -> OneServer:
    return OneServer(backend)


def take_high(server: OneServer, owner: str, number: int, key: str) -> int:
    """Have a key taken with a token that is far above all others."""
    high = server.now + HIGH
    assert server.value(owner, number, key, proposal=high, ahead=2 * HIGH) == high
    return high


class TestTake:
    def test_what_is_sent_again_is_answered_as_before(self, server: OneServer, key: str) -> None:
        first = server.take("a", 5, key, proposal=server.now)
        again = server.take("a", 5, key, proposal=server.now)
        assert first[0] == again[0] == b"G"
        # The token, and since when.
        assert again[2:4] == first[2:4]

    def test_a_later_try_of_the_same_asker_takes_over(self, server: OneServer, key: str) -> None:
        value = server.value("a", 5, key)
        assert server.value("a", 6, key) == value
        assert server.release("a", key, number=5) == "0"
        assert server.release("a", key, number=6) == "1"

    def test_a_try_that_arrives_after_a_later_one_changes_nothing(
        self, server: OneServer, key: str
    ) -> None:
        server.value("a", 5, key)
        record = server.field(key)
        assert server.take("a", 4, key)[0] == b"D"
        assert server.field(key) == record

    @pytest.mark.parametrize("how", ["undone", "abandoned", "released"])
    def test_a_try_that_arrives_after_its_end_is_none(
        self, server: OneServer, key: str, how: str
    ) -> None:
        """Nobody knows of it any more, and nobody would free the key."""
        token = server.value("a", 5, key)
        ends = {"undone": {"number": 5}, "abandoned": {}, "released": {"token": token}}
        assert server.release("a", key, **ends[how]) == "1"
        record = server.field(key)
        for number in (4, 5):
            assert server.take("a", number, key)[0] == b"D"
        assert server.field(key) == record
        assert server.value("a", 6, key) > token

    def test_numbers_of_tries_are_compared_as_numbers(self, server: OneServer, key: str) -> None:
        server.value("a", 9, key)
        server.value("a", 10, key)
        assert server.take("a", 9, key)[0] == b"D"

    def test_tries_of_others_are_not_compared(self, server: OneServer, key: str) -> None:
        server.value("a", 5, key)
        assert server.take("b", 6, key)[0] == b"D"
        assert server.release("a", key, number=5) == "1"
        server.value("b", 1, key)

    def test_until_the_minimum_hold_has_passed_nobody_takes_it(
        self, server: OneServer, key: str
    ) -> None:
        """Not who had it before either."""
        server.value("a", 1, key, proposal=server.now)
        assert server.release("a", key, number=1, hold=60 * SECOND) == "1"
        record = server.field(key)
        for owner in ("a", "b"):
            assert server.take(owner, 2, key)[0] == b"D"
        assert server.field(key) == record

    def test_of_several_keys_all_are_taken_or_none(self, server: OneServer, key: str) -> None:
        server.value("a", 1, f"{key}:2")
        reply = server.take("b", 1, f"{key}:1", f"{key}:2", f"{key}:3")
        assert reply[0] == b"D"
        assert reply[2][:2] == [f"{key}:2".encode(), b"a"]
        assert server.field(f"{key}:1") is None
        assert server.field(f"{key}:3") is None

    def test_several_keys_have_the_highest_of_their_tokens(
        self, server: OneServer, key: str
    ) -> None:
        high = take_high(server, "a", 1, f"{key}:1")
        server.release("a", f"{key}:1")
        assert server.value("b", 1, f"{key}:1", f"{key}:2") > high

    def test_a_proposal_too_far_ahead_of_the_clock_changes_nothing(
        self, server: OneServer, key: str
    ) -> None:
        reply = server.take("a", 1, key, proposal=server.now + HIGH, ahead=HIGH // 2)
        assert reply[0] == b"S"
        assert server.field(key) is None

    def test_nothing_is_taken_in_quarantine(self, server: OneServer, key: str) -> None:
        server.disown()
        assert server.take("a", 1, key)[0] == b"Q"
        # Not only the first who asks is told.
        assert server.take("a", 1, key)[0] == b"Q"
        assert server.field(key) is None


class TestRaise:
    """Who has the agreed token counts as one who has granted the key."""

    def test_it_is_put_on_the_keys(self, server: OneServer, key: str) -> None:
        keys = f"{key}:1", f"{key}:2"
        token = server.value("a", 5, *keys) + 7
        before = [server.field(one) for one in keys]
        assert server.raise_to(token, "a", 5, *keys)
        assert [server.field(one) for one in keys] == [
            f"{was[:16]}{token:016d}{was[32:]}" for was in before if was
        ]

    def test_where_it_is_already_that_is_well(self, server: OneServer, key: str) -> None:
        token = server.value("a", 5, key)
        assert server.raise_to(token, "a", 5, key)

    @pytest.mark.parametrize(("owner", "number"), [("b", 5), ("a", 4), ("a", 6)])
    def test_only_for_the_try_that_has_the_keys(
        self, server: OneServer, key: str, owner: str, number: int
    ) -> None:
        token = server.value("a", 5, key) + 7
        record = server.field(key)
        assert not server.raise_to(token, owner, number, key)
        assert server.field(key) == record

    def test_not_where_there_is_a_higher_one(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 5, key)
        record = server.field(key)
        assert not server.raise_to(high - 1, "a", 5, key)
        assert server.field(key) == record

    def test_not_in_quarantine(self, backend: RedlockBackend, server: OneServer, key: str) -> None:
        """The record is there, but another that was granted the key may be missing."""
        token = server.value("a", 5, key) + 7
        record = server.field(key)
        server.disown()
        assert not server.raise_to(token, "a", 5, key)
        assert not server.raise_to(token, "a", 5, key)
        assert server.field(key) == record
        backend.quarantine(end=True)
        assert server.raise_to(token, "a", 5, key)

    @pytest.mark.parametrize("how", ["never", "freed", "cooling", "expired"])
    def test_not_without_a_claim(self, server: OneServer, key: str, how: str) -> None:
        token = server.now + SECOND
        if how != "never":
            token += server.value("a", 5, key, proposal=server.now)
        if how in ("freed", "cooling"):
            hold = 60 * SECOND if how == "cooling" else 0
            assert server.release("a", key, number=5, hold=hold) == "1"
        if how == "expired":
            server.age(key, SECOND)
        record = server.field(key)
        assert not server.raise_to(token, "a", 5, key)
        assert server.field(key) == record

    def test_on_all_keys_or_none(self, server: OneServer, key: str) -> None:
        token = server.value("a", 5, f"{key}:1") + 7
        server.value("b", 5, f"{key}:2")
        record = server.field(f"{key}:1")
        assert not server.raise_to(token, "a", 5, f"{key}:1", f"{key}:2")
        assert server.field(f"{key}:1") == record


class TestForgetting:
    """Records go, tokens do not."""

    def test_what_takes_clear_away(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 1, key)
        server.release("a", key)
        server.age(key, LONG_AGO)
        clear_away(server, key)
        assert server.value("b", 1, key) > high

    def test_what_takes_clear_away_after_it_has_expired(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 1, key)
        server.age(key, LONG_AGO)
        clear_away(server, key)
        assert server.value("b", 1, key) > high

    def test_what_is_swept_after_it_has_ended(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 1, key)
        server.release("a", key)
        server.age(key, LONG_AGO)
        assert server.sweep() == (1, [])
        assert server.field(key) is None
        assert server.value("b", 1, key) > high

    def test_what_is_swept_after_it_has_expired(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 1, key)
        server.age(key, 1)
        assert server.sweep() == (0, [key])
        assert server.field(key) is None
        assert server.value("b", 1, key) > high

    def test_what_is_forced(self, server: OneServer, key: str) -> None:
        high = take_high(server, "a", 1, key)
        _, told = server.run("force", key)
        assert told[1] == b"a"
        # It is the holder's no longer.
        assert server.release("a", key, token=high) == "0"
        assert server.value("b", 1, key) > high

    def test_a_lower_token_that_goes_leaves_the_higher(self, server: OneServer, key: str) -> None:
        """Which token was whose is not remembered, so the highest of them counts for all."""
        high = take_high(server, "a", 1, f"{key}:high")
        server.value("a", 1, f"{key}:low")
        for name in ("high", "low"):
            server.age(f"{key}:{name}", 1)
            assert server.sweep() == (0, [f"{key}:{name}"])
        assert server.value("b", 1, f"{key}:high") > high

    def test_a_sweep_leaves_what_is_live_or_may_be_asked_for(
        self, server: OneServer, key: str
    ) -> None:
        """A release that is sent twice finds its first."""
        server.value("a", 1, f"{key}:live")
        server.value("a", 1, f"{key}:freed")
        server.release("a", f"{key}:freed")
        server.age(f"{key}:freed", SECOND)
        assert server.sweep() == (0, [])
        assert server.release("a", f"{key}:live", f"{key}:freed") == "11"

    def test_a_dry_sweep_changes_nothing(self, server: OneServer, key: str) -> None:
        server.value("a", 1, key)
        server.age(key, LONG_AGO)
        record = server.field(key)
        assert server.sweep(dry_run=True) == (0, [key])
        assert server.field(key) == record


def clear_away(server: OneServer, key: str) -> None:
    """Take other keys until the key's record has gone: each time, some records are looked at."""

    def is_gone() -> bool:
        server.value("c", 1, f"{key}:other")
        # Else the hash grows, and it is found less and less.
        server.ask("HDEL", f"{key}:other")
        return server.field(key) is None

    eventually(is_gone)


class TestQuarantine:
    def test_it_lasts_as_long_as_any_lease_and_twice_the_clocks_difference(
        self, five: IndependentGroup, make: Make, key: str
    ) -> None:
        backend = make(clock_skew=1.0)
        for member in five.members:
            member.ask("FLUSHALL")
        letter, _, left = OneServer(backend).take("a", 1, key)
        assert letter == b"Q"
        assert TTL + 1.9 < left / SECOND <= TTL + 2.0
        assert TTL + 1.5 < backend.quarantine() <= TTL + 2.0

    def test_tokens_after_it_are_above_its_end(
        self, five: IndependentGroup, make: Make, key: str
    ) -> None:
        server = OneServer(make(ttl=1.0))
        five.members[0].ask("FLUSHALL")
        letter, now, left = server.take("a", 1, key)
        assert letter == b"Q"
        # Whoever asks with whatever proposal.
        reply = eventually(lambda: granted(server, key))
        assert int(reply[1]) >= int(now) + left
        assert int(reply[2]) > int(now) + left

    def test_tokens_are_above_those_before_it_also_when_it_is_ended_by_hand(
        self, five: IndependentGroup, make: Make, key: str
    ) -> None:
        backend = make(clock_skew=5.0)
        server = OneServer(backend)
        # As high as two clocks that differ so much allow.
        before = server.value("a", 1, key, proposal=server.now + 9 * SECOND, ahead=10 * SECOND)
        five.members[0].ask("FLUSHALL")
        assert backend.quarantine(end=True) == 0
        assert server.value("b", 1, key) > before

    def test_ending_it_leaves_a_higher_token(
        self, backend: RedlockBackend, server: OneServer, key: str
    ) -> None:
        """It had been remembered from before, and the quarantine had no part in it."""
        floor = f"{server.now + 3600 * SECOND:016d}"
        server.ask("HSET", "\1t", floor)
        server.disown()
        assert server.take("a", 1, key)[0] == b"Q"
        assert backend.quarantine(end=True) == 0
        assert server.field("\1t") == floor
        assert server.value("a", 1, key) > int(floor)

    def test_one_that_passes_leaves_a_higher_token(self, make: Make, key: str) -> None:
        server = OneServer(make(ttl=1.0))
        floor = server.now + 3600 * SECOND
        server.ask("HSET", "\1t", f"{floor:016d}")
        server.disown()
        assert server.take("a", 1, key)[0] == b"Q"
        reply = eventually(lambda: granted(server, key))
        assert int(reply[2]) > floor


def granted(server: OneServer, key: str) -> list[bytes]:
    """The answer, if the key is taken."""
    reply: list[bytes] = server.take("a", 1, key, proposal=LOW)
    return reply if reply[0] == b"G" else []

    def test_ending_it_leaves_a_token_that_is_not_as_high_as_its_end(
        self, make: Make, key: str
    ) -> None:
        backend = make(ttl=30.0)
        server = OneServer(backend)
        floor = server.now + 10 * SECOND
        server.ask("HSET", "\x01t", f"{floor:016d}")
        server.disown()
        assert server.take("a", 1, key)[0] == b"Q"
        assert backend.quarantine(end=True) == 0
        assert server.value("a", 1, key) > floor


class TestExtend:
    def test_it_lasts_longer(self, server: OneServer, key: str) -> None:
        token = server.value("a", 1, key, hold=SECOND)
        now = server.now
        assert server.extend("a", token, key, ttl=60 * SECOND) == "1"
        record = server.field(key)
        assert record is not None
        assert int(record[:16]) >= now + 60 * SECOND

    def test_a_server_in_quarantine_does_not_say(
        self, backend: RedlockBackend, server: OneServer, key: str
    ) -> None:
        """Neither that it is had nor that it is lost, whatever records there are."""
        token = server.value("a", 1, key)
        record = server.field(key)
        server.disown()
        for _ in range(2):
            letters = server.extend("a", token, key, f"{key}:none", ttl=90 * SECOND)
            assert letters == "BB"
        assert server.field(key) == record
        backend.quarantine(end=True)
        letters = server.extend("a", token, key, f"{key}:none", ttl=90 * SECOND)
        assert letters == "10"

    @pytest.mark.parametrize("how", ["another's", "another grant's", "freed", "cooling", "expired"])
    def test_what_is_lost_is_not_brought_back(self, server: OneServer, key: str, how: str) -> None:
        token = server.value("ab", 1, key, proposal=server.now)
        owner = "a" if how == "another's" else "ab"
        if how == "another grant's":
            token += 1
        if how in ("freed", "cooling"):
            hold = 60 * SECOND if how == "cooling" else 0
            assert server.release("ab", key, token=token, hold=hold) == "1"
        if how == "expired":
            server.age(key, 1)
        record = server.field(key)
        assert server.extend(owner, token, key, ttl=90 * SECOND) == "0"
        assert server.field(key) == record


class TestRelease:
    def test_an_undone_try_frees_what_is_its_own(self, server: OneServer, key: str) -> None:
        server.value("a", 12, key)
        record = server.field(key)
        for number in (1, 11, 13, 120):
            assert server.release("a", key, number=number) == "0"
        assert server.field(key) == record
        assert server.release("a", key, number=12) == "1"
        server.value("b", 1, key)

    def test_it_is_answered_alike_when_it_is_sent_again(self, server: OneServer, key: str) -> None:
        token = server.value("a", 5, key)
        assert server.release("a", key, token=token) == "1"
        assert server.release("a", key, token=token) == "1"

    def test_another_grant_is_not_freed(self, server: OneServer, key: str) -> None:
        token = server.value("a", 5, key)
        record = server.field(key)
        assert server.release("a", key, token=token + 1) == "0"
        assert server.field(key) == record

    def test_nor_is_anybody_elses(self, server: OneServer, key: str) -> None:
        """Not that of an owner either whose id begins alike."""
        token = server.value("ab", 5, key)
        record = server.field(key)
        for owner in ("a", "b", "abc"):
            assert server.release(owner, key) == "0"
            assert server.release(owner, key, token=token) == "0"
        assert server.field(key) == record

    def test_in_quarantine_an_unknown_owner_may_have_had_it(
        self, backend: RedlockBackend, server: OneServer, key: str
    ) -> None:
        """Nobody has been let in since."""
        assert server.release("a", key) == "0"
        server.disown()
        assert server.release("a", key) == "1"
        assert server.release("a", key) == "1"
        backend.quarantine(end=True)
        assert server.release("a", key) == "0"

    def test_in_quarantine_too_another_keeps_what_it_has(
        self, backend: RedlockBackend, server: OneServer, key: str
    ) -> None:
        server.value("b", 1, key)
        record = server.field(key)
        server.disown()
        assert server.release("a", key) == "1"
        assert server.field(key) == record
        backend.quarantine(end=True)
        assert server.take("a", 2, key)[0] == b"D"

    def test_in_quarantine_what_is_known_is_freed(
        self, backend: RedlockBackend, server: OneServer, key: str
    ) -> None:
        token = server.value("a", 1, key)
        server.disown()
        assert server.release("a", key, token=token) == "1"
        backend.quarantine(end=True)
        server.value("b", 1, key)
