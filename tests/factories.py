"""Makes rows of the models, in the states that they can be in."""

import time
import uuid
from typing import Any

import factory
from django.db import DEFAULT_DB_ALIAS

from distlocks.models import Lock

SECOND = 1_000_000


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class LockFactory(factory.django.DjangoModelFactory):
    """A lock that is held for half a minute, unless a trait says otherwise.

    `LockFactory(expired=True, key="order:42", using="postgres")`. A lock's moments follow from
    `age`, the seconds since it was acquired. The clock is this machine's.
    """

    class Meta:
        model = Lock

    class Params:
        # Seconds.
        age = 5
        # The default, by its name.
        held = factory.Trait()
        # Neither released nor extended in time.
        expired = factory.Trait(
            age=60, expires_at=factory.LazyAttribute(lambda lock: lock.acquired_at + 30 * SECOND)
        )
        # Released; who had it last is still known.
        free = factory.Trait(owner_id="", expires_at=0)
        # Released before its minimum hold was over.
        cooling = factory.Trait(owner_id="")

    key = factory.LazyFunction(lambda: f"lock:{uuid.uuid4().hex}")
    owner_id = factory.LazyFunction(lambda: f"{uuid.uuid4().hex[:24]}-1")
    acquired_at = factory.LazyAttribute(lambda lock: now_us() - round(lock.age * SECOND))
    fencing_token = factory.SelfAttribute("acquired_at")
    expires_at = factory.LazyFunction(lambda: now_us() + 30 * SECOND)
    waiting_until = 0
    host = "web-1"
    pid = factory.Sequence(lambda n: 1000 + n)
    thread = "MainThread"
    label = ""
    metadata = factory.LazyFunction(dict)

    @classmethod
    def _create(cls, model_class: type[Lock], *args: Any, **kwargs: Any) -> Lock:
        using = kwargs.pop("using", DEFAULT_DB_ALIAS)
        return model_class.objects.using(using).create(*args, **kwargs)
