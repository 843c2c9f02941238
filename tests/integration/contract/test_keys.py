"""One lock for each key, exactly as it is written, and no lock for what is no key."""

from collections.abc import Callable
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from distlocks import LockTimeout
from distlocks.testing import flush_events
from tests.integration.contract.stores import Store, for_stores

# Each pair differs in what a store's collation or normalisation might forget.
ALIKE = {
    "case": ("Order", "order"),
    "Turkish i": ("TITLE", "t\u0131tle"),
    "accent": ("caf\u00e9", "cafe"),
    "composition": ("caf\u00e9", "cafe\u0301"),
    "trailing space": ("order", "order "),
    "leading space": ("order", " order"),
    "no-break space": ("a b", "a\u00a0b"),
    "width": ("\uff21", "A"),
    "sharp s": ("stra\u00dfe", "strasse"),
    "zero width": ("order", "or\u200bder"),
    "beyond the basic plane": ("\U0001f512", "\U0001f513"),
    "wild card": ("50%", "50_"),
    "quotes": ("it's", "it''s"),
    "backslash": ("a\\b", "a\\\\b"),
    "digits": ("1", "01"),
    "braces": ("{0}", "{}"),
    "percent format": ("%s", "%%s"),
}


def test_two_keys_are_two_locks_however_alike(store: Store, key: str) -> None:
    for what, pair in ALIKE.items():
        one, other = (f"{suffix}\u2063{key[-32:]}\u2063{suffix}" for suffix in pair)
        first = store.hold(one)
        second = store.hold(other)
        assert store.owner(one) == first.owner_id, what
        assert store.owner(other) == second.owner_id, what
        with pytest.raises(LockTimeout) as denied:
            store.lock(other, timeout=0).acquire()
        assert denied.value.holders[0].key == other
        assert first.release(), what
        assert store.is_free(one), what
        assert second.release(), what


def test_the_longest_keys_are_kept_whole(store: Store, key: str) -> None:
    for character in ("x", "\u00e9", "\U0001f512", "'", '"', "\\", "%"):
        start = key[-32:] + character
        one = start + character * (200 - len(start))
        other = one[:-1] + "y"
        first, second = store.hold(one), store.hold(other)
        assert first.keys == (one,)
        assert {holder.key for holder in store.backend.holders(start)} == {one, other}
        assert second.release()
        assert store.owner(one) == first.owner_id


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": ("", ValueError, "must not be empty"),
    "too long": ("x" * 201, ValueError, "at most 200"),
    "bytes": (b"order", TypeError, "decode"),
    "number": (42, TypeError, "must be a str"),
    "none": (None, TypeError, "must be a str"),
    "control character": ("a\nb", ValueError, "control character"),
    "null character": ("a\x00b", ValueError, "control character"),
    "lone surrogate": ("a\ud800b", ValueError, "lone surrogate"),
}


@for_stores(("memory",))
@pytest.mark.parametrize(("key", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_key_is_refused_with_the_way_out(
    store: Store, key: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        store.lock(key)


@for_stores(("memory",))
def test_no_key_at_all_is_refused(store: Store) -> None:
    with pytest.raises(TypeError, match="at least one key"):
        store.lock()


def test_a_key_twice_is_one_lock(store: Store, key: str) -> None:
    lease = store.hold(key, key)
    assert lease.keys == (key,)
    assert lease.release()
    assert store.is_free(key)


class TestSeveralKeys:
    def test_their_order_does_not_matter(self, store: Store, key: str) -> None:
        a, b = f"{key}:a", f"{key}:b"
        with store.lock(b, a, timeout=0) as lease:
            assert lease.keys == (a, b)
            assert lease.fencing_tokens.keys() == {a, b}
            with pytest.raises(ValueError, match="fencing_tokens"):
                _ = lease.fencing_token
            with pytest.raises(LockTimeout):
                store.lock(a, b, timeout=0).acquire()

    def test_all_or_none(self, store: Store, key: str) -> None:
        a, b, c = (f"{key}:{name}" for name in "abc")
        store.hold(b)
        with pytest.raises(LockTimeout) as denied:
            store.lock(a, b, c, timeout=0).acquire()
        assert denied.value.keys == (a, b, c)
        assert [one.key for one in denied.value.holders] == [b], "the one in the way"
        assert repr(b) in str(denied.value)
        assert store.is_free(a)
        assert store.is_free(c)

    def test_all_end_with_the_block(self, store: Store, key: str) -> None:
        a, b = f"{key}:a", f"{key}:b"
        with store.lock(a, b, timeout=0):
            assert not store.is_free(a)
            assert not store.is_free(b)
        assert store.is_free(a)
        assert store.is_free(b)

    def test_one_of_them_lost_is_the_lease_lost(self, store: Store, key: str) -> None:
        a, b = f"{key}:a", f"{key}:b"
        lease = store.hold(a, b)
        store.backend.force_release(b)
        assert lease.release() is False
        assert lease.lost
        assert store.is_free(a)


class TestKeyPrefix:
    @pytest.fixture
    def prefixed(self, store: Store, settings: Settings) -> Callable[[str], Store]:
        """The same store under the aliases "one" and "two", which differ in their prefix."""
        entry = settings.DISTLOCKS[store.alias]
        settings.DISTLOCKS = {
            **settings.DISTLOCKS,
            "one": {**entry, "KEY_PREFIX": "one%:"},
            "two": {**entry, "KEY_PREFIX": "two:"},
        }
        return Store

    def test_two_prefixes_are_two_locks(self, prefixed: Callable[[str], Store], key: str) -> None:
        one, two = prefixed("one"), prefixed("two")
        first, second = one.hold(key), two.hold(key)
        assert one.holder(key).owner_id == first.owner_id
        assert two.holder(key).owner_id == second.owner_id
        assert first.release()
        assert one.is_free(key)
        assert not two.is_free(key)
        assert second.release()
        one.clean_up()
        two.clean_up()

    def test_nobody_gets_to_see_it(
        self, prefixed: Callable[[str], Store], key: str, told: Any
    ) -> None:
        one = prefixed("one")
        lease = one.hold(key)
        assert lease.keys == (key,)
        assert lease.fencing_tokens.keys() == {key}
        assert [holder.key for holder in one.backend.holders(key)] == [key]
        with pytest.raises(LockTimeout) as denied:
            one.lock(key, timeout=0).acquire()
        assert denied.value.keys == (key,)
        assert denied.value.holders[0].key == key
        assert "one%:" not in str(denied.value)
        (had,) = one.backend.force_release(key)
        assert had is not None
        assert had.key == key
        assert one.is_free(key)
        lease.release()
        flush_events()
        from distlocks import signals

        for signal in (signals.lock_acquired, signals.lock_denied, signals.lease_lost):
            assert [said["keys"] for said in told.of(signal, key)] == [(key,)]
        one.clean_up()

    def test_the_longest_key_fits_behind_the_longest_prefix(
        self, store: Store, settings: Settings, key: str
    ) -> None:
        settings.DISTLOCKS = {
            **settings.DISTLOCKS,
            "longest": {**settings.DISTLOCKS[store.alias], "KEY_PREFIX": "\U0001f512" * 50},
        }
        longest = Store("longest")
        name = key[-32:] + "\U0001f513" * (200 - 32)
        lease = longest.hold(name)
        assert longest.holder(name) is not None
        assert lease.release()
        assert longest.is_free(name)
        longest.clean_up()
