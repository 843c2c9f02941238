"""The rows of locks: their states, their order, and how keys are compared."""

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks.models import Lock
from tests.factories import LockFactory, now_us

pytestmark = pytest.mark.django_db(databases=["default", "postgres"])


@pytest.fixture(params=["default", "postgres"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without locks."""
    entry = settings.DISTLOCKS["default"] | {"OPTIONS": {"using": request.param}}
    with override_settings(DISTLOCKS={"default": entry}):
        Lock.objects.using(request.param).delete()
        yield request.param


def test_the_queryset_knows_the_states(using: str) -> None:
    for state in ("held", "cooling", "expired", "free"):
        LockFactory(using=using, key=state, **{state: True})
    LockFactory(using=using, key="barely", expires_at=now_us() + 10_000_000)
    locks = Lock.objects.using(using)
    assert {lock.key for lock in locks.taken()} == {"held", "cooling", "barely"}
    assert {lock.key for lock in locks.held()} == {"held", "barely"}
    assert {lock.key for lock in locks.expired()} == {"expired"}
    assert locks.filter(key="held").taken().exists()
    assert locks.taken().filter(label="").held().count() == 2


def test_locks_come_in_the_order_of_their_keys(using: str) -> None:
    for key in ("b", "a", "C"):
        LockFactory(using=using, key=key)
    assert [lock.key for lock in Lock.objects.using(using).all()] == ["C", "a", "b"]


def test_a_lock_is_known_by_its_key_and_its_moments(using: str) -> None:
    held = LockFactory(using=using, key="order:42")
    assert str(held) == "order:42"
    assert round(held.acquired.timestamp() * 1_000_000) == held.acquired_at
    assert held.expires is not None
    assert round(held.expires.timestamp() * 1_000_000) == held.expires_at
    assert not held.cooling_down
    assert LockFactory(using=using, cooling=True).cooling_down
    assert LockFactory(using=using, free=True).expires is None


def test_keys_are_compared_exactly(using: str) -> None:
    alike = ["order", "Order", "order ", " order", "órder", "o\u0301rder"]
    for key in alike:
        LockFactory(using=using, key=key)
    locks = Lock.objects.using(using)
    for key in alike:
        assert locks.get(key=key).key == key
        assert locks.filter(key__in=[key]).count() == 1
    assert locks.count() == len(alike)
