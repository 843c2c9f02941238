"""A fast path, as a store: whichever of its halves has the authority."""

from typing import cast

from django.conf import settings

from distlocks import clock
from distlocks.backends.fastpath import FastPathBackend
from distlocks.backends.phases import DATABASE
from distlocks.backends.redis import RedisBackend
from distlocks.models import Lock, LockAuthority
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import Store


def fast_store(alias: str) -> Store:
    return FastPathStore(alias) if alias == "fastpath" else FallenBackStore(alias)


class FastPathStore(RedisStore):
    """While Redis has the authority."""

    def prepare(self) -> None:
        # What earlier tests have left in the table is not waited for.
        database = Lock.objects.using(self.fast_path.database.using)
        while self.fast_path.authority.look().phase != "redis":
            self.aside(lambda: database.update(expires_at=0))

    @property
    def fast_path(self) -> FastPathBackend:
        return cast(FastPathBackend, self.backend)

    @property
    def redis(self) -> RedisBackend:
        return self.fast_path.redis


class FallenBackStore(Store):
    """While the database has the authority, and is to keep it."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        backend = cast(FastPathBackend, self.backend)
        terms = backend.settings.terms
        LockAuthority.objects.using(self.using).update_or_create(
            name=backend.settings.name,
            defaults={
                "epoch": 7,
                "phase": DATABASE,
                "since": clock.current().wall_us(),
                "mode_lease": terms.mode_lease * 1_000_000,
                "max_ttl": terms.max_ttl * 1_000_000,
                "patience": 0,
                "pinned": True,
            },
        )

    @property
    def using(self) -> str:
        options = settings.DISTLOCKS[self.alias]["OPTIONS"]
        return str(settings.DISTLOCKS[options["database"]]["OPTIONS"]["using"])
