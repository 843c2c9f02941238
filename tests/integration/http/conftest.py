"""The site, its locks in memory, and a rival that has the key of its views."""

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks import Lease, db_lock
from distlocks.history.holds import holds
from distlocks.history.journal import journal
from distlocks.testing import FakeClock
from distlocks.testing.overrides import MEMORY_BACKEND
from tests.integration.http import site


@pytest.fixture(autouse=True)
def _site(lock_clock: FakeClock) -> Iterator[None]:
    with override_settings(
        ROOT_URLCONF=site.__name__,
        DISTLOCKS={"default": {"BACKEND": MEMORY_BACKEND, "HISTORY_DAYS": 0}},
        MIDDLEWARE=[
            *settings.MIDDLEWARE,
            "distlocks.middleware.LockErrorsMiddleware",
            "distlocks.middleware.WorkingForMiddleware",
        ],
    ):
        yield
    if holds.observe in journal.observers:
        journal.observers.remove(holds.observe)
    holds._seen.clear()
    holds._started = False


@pytest.fixture
def rival() -> Lease:
    """Has the key for another 20 s."""
    lease = db_lock(
        site.KEY, ttl=20, label="nightly import", metadata={"customer": "Bond"}
    ).acquire()
    return lease
