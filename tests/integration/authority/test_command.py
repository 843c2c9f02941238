"""manage.py lock_authority."""

import re
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from tests.integration.authority.scene import FAST, MAX_TTL, Scene, sent_at, until


def command(**options: Any) -> str:
    """What the command says."""
    said = StringIO()
    call_command("lock_authority", backend=[FAST], stdout=said, **options)
    return said.getvalue()


def test_it_says_who_grants_since_when_and_why(fast: Scene) -> None:
    with fast.lock("a", timeout=0):
        pass
    assert re.fullmatch(
        rf"{FAST}: Redis grants \(epoch \d+, for \d+ s, since [-\d]+ [:\d]+ UTC\)\. "
        r"The fast path is used for the first time\.\n",
        command(),
    )


def test_the_authority_is_taken_from_redis_and_kept_until_it_may_return(
    fast: Scene, key: str
) -> None:
    with fast.lock(key, timeout=0):
        pass
    said = command(drain=True, interactive=False, why="Redis gets more memory.")
    assert "nobody grants until the leases from Redis have ended" in said
    assert "the database grants" in said
    assert "pinned until --return" in said
    assert "Redis gets more memory." in said
    lease = fast.hold(key)
    assert fast.store_of(lease) == "database"
    lease.release()

    said = command(back=True, interactive=False)
    assert said.splitlines()[-1].startswith(f"{FAST}: Redis grants")
    lease = fast.hold(key)
    assert fast.store_of(lease) == "redis"
    lease.release()


def test_what_is_not_confirmed_is_not_done(fast: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "yes"

    monkeypatch.setattr("builtins.input", answer)
    said = command(drain=True)
    assert asked == ["Type 'drain' to do it: "]
    assert "nobody is granted a lock; then the database grants" in said
    assert (fast.row.phase, fast.row.pinned) == ("redis", False)


def test_what_is_confirmed_is_done(fast: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "drain")
    command(drain=True, follow=False)
    assert (fast.row.phase, fast.row.pinned) == ("drain", True)


def test_a_long_lease_of_the_database_keeps_the_authority_and_is_named(
    scene: Scene, key: str
) -> None:
    scene.begin(pinned=True)
    scene.add()
    lease = scene.hold(key, renew=True)
    until(sent_at(lease) + 1.2 * MAX_TTL)
    command(back=True, follow=False, interactive=False)
    assert repr(f"{scene.prefix}{key}") in command()
    assert scene.row.phase == "db"
    lease.release()
    said = command(back=True, interactive=False)
    assert said.splitlines()[-1].startswith(f"{FAST}: Redis grants")


def test_no_lease_is_ended_for_a_return_that_cannot_be(scene: Scene, key: str) -> None:
    scene.begin(pinned=True)
    scene.add()
    lease = scene.hold(key, renew=True)
    scene.server.kill()
    with pytest.raises(CommandError, match=r"Redis is not well, and no lease is ended: .*answer"):
        command(back=True, end_leases=True, interactive=False)
    assert (scene.row.phase, scene.row.pinned) == ("db", True)
    lease.extend()


def test_leases_are_ended_only_with_the_return(fast: Scene) -> None:
    with pytest.raises(CommandError, match="goes with --return"):
        command(end_leases=True)


def test_it_is_about_fast_paths(fast: Scene) -> None:
    with pytest.raises(CommandError, match="'postgres' is no fast path"):
        call_command("lock_authority", backend=["postgres"])
    with pytest.raises(CommandError, match=r"no lock backend 'other'.*memory"):
        call_command("lock_authority", backend=["other"])
