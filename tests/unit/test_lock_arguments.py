"""What db_lock() takes, and what it says about everything else."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation

from distlocks import LockTimeout, NotSupported, db_lock, locks
from distlocks.testing import memory_locks

YEAR = 366 * 86400


@pytest.fixture(autouse=True)
def in_memory() -> Iterator[None]:
    with memory_locks():
        yield


def holders() -> list[str]:
    return [holder.key for holder in locks["default"].holders()]


# What each wrong argument is answered with, when the lock is written down.
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("ttl", {"ttl": "30"}, TypeError, "ttl must be a number of seconds or a timedelta, not str"),
    ("ttl", {"ttl": None}, TypeError, "ttl must be a number of seconds or a timedelta, not None"),
    ("ttl", {"ttl": True}, TypeError, "ttl must be a number of seconds or a timedelta, not bool"),
    ("ttl", {"ttl": float("nan")}, ValueError, "ttl must be finite"),
    ("ttl", {"ttl": float("inf")}, ValueError, "ttl must be finite"),
    ("timeout", {"timeout": "10"}, TypeError, "timeout must be a number of seconds"),
    ("timeout", {"timeout": False}, TypeError, "timeout must be a number of seconds"),
    ("timeout", {"timeout": -0.1}, ValueError, "timeout=-0.1 s is not allowed"),
    ("timeout", {"timeout": float("nan")}, ValueError, "timeout must be finite"),
    ("timeout", {"timeout": float("inf")}, ValueError, "timeout must be finite"),
    ("timeout", {"timeout": YEAR + 1}, ValueError, "it must be from 0 to"),
    ("max_hold", {"max_hold": 0.5}, ValueError, "max_hold=0.5 s is not allowed: it must be from 1"),
    ("max_hold", {"max_hold": 0}, ValueError, "max_hold=0 s is not allowed"),
    ("max_hold", {"max_hold": "1h"}, TypeError, "max_hold must be a number of seconds"),
    ("min_hold", {"min_hold": -1}, ValueError, "min_hold=-1 s is not allowed"),
    ("min_hold", {"min_hold": None}, TypeError, "min_hold must be a number of seconds"),
    ("min_hold", {"min_hold": timedelta(days=400)}, ValueError, "min_hold="),
    ("renew", {"renew": 1}, TypeError, "renew must be True or False, not 1"),
    ("renew", {"renew": None}, TypeError, "renew must be True or False, not None"),
    ("until_commit", {"until_commit": "no"}, TypeError, "until_commit must be True or False"),
    ("on_held", {"on_held": "wait"}, ValueError, "on_held must be 'raise', 'skip' or a callable"),
    ("on_held", {"on_held": None}, ValueError, "on_held must be 'raise', 'skip' or a callable"),
    ("on_held", {"on_held": ["skip"]}, ValueError, "on_held must be 'raise', 'skip' or a callable"),
    ("on_lost", {"on_lost": "mail"}, TypeError, "on_lost must be a callable that gets the lease"),
    ("label", {"label": None}, TypeError, "label must be a str, not NoneType"),
    ("label", {"label": b"nightly"}, TypeError, "label must be a str, not bytes"),
    ("label", {"label": "x" * 201}, ValueError, "label has 201 characters; at most 200"),
    ("label", {"label": "a\x00"}, ValueError, "holds the control character U+0000 at position 1"),
    ("metadata", {"metadata": ["run"]}, TypeError, "metadata must be a dict of JSON values"),
    ("metadata", {"metadata": "{}"}, TypeError, "metadata must be a dict of JSON values"),
    ("metadata", {"metadata": {"at": timedelta(1)}}, TypeError, "metadata must hold what JSON can"),
    ("metadata", {"metadata": {(1, 2): 3}}, TypeError, "metadata must hold what JSON can"),
    ("metadata", {"metadata": {"x": float("nan")}}, ValueError, "metadata must hold what JSON can"),
    ("metadata", {"metadata": {"x": ["\x00"]}}, ValueError, "the control character U+0000"),
    # JSON can write it down, and no database takes it.
    ("metadata", {"metadata": {"x": "\ud800"}}, ValueError, "metadata"),
    ("backend", {"backend": None}, TypeError, "backend must be an alias of DISTLOCKS, not None"),
    ("backend", {"backend": 7}, TypeError, "backend must be an alias of DISTLOCKS, not 7"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [pytest.param(*case, id=f"{case[0]}-{next(iter(case[1].values()))!r:.30}") for case in REFUSED],
)
def test_a_wrong_option_is_refused_by_name(
    name: str, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        db_lock("order:42", **arguments)
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("", ValueError, "must not be empty"),
        ("x" * 201, ValueError, "has 201 characters"),
        ("a\n", ValueError, "the control character U+000A"),
        ("\ud800", ValueError, "the lone surrogate U+D800"),
        (b"order:42", TypeError, "must be a str, not bytes: decode it"),
        (42, TypeError, "must be a str, not int"),
        (None, TypeError, "must be a str, not NoneType"),
        (["a", "b"], TypeError, "must be a str, not list"),
        (("a", 7), TypeError, "lock key"),
    ],
)
def test_a_wrong_key_is_refused_before_anything_is_asked(
    key: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        db_lock("good", key)
    assert words in str(caught.value)


def test_a_lock_protects_something() -> None:
    with pytest.raises(TypeError, match="needs at least one key"):
        db_lock()


@pytest.mark.parametrize("option", ["exclusive", "permits", "tll", "wait"])
def test_an_option_that_there_is_not_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        db_lock("a", **{option: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl", [0, 0.99, -1, 30.01, timedelta(hours=1)])
def test_a_ttl_outside_the_alias_bounds_is_refused_with_the_bounds(ttl: Any) -> None:
    lock = db_lock("a", ttl=ttl)
    with pytest.raises(ValueError, match=r"leases of 'default' last from 1 to 30 s \(MAX_TTL\)"):
        lock.acquire()
    assert holders() == []


@pytest.mark.parametrize("ttl", [0.5, 31, "30"])
def test_an_extension_is_bound_by_the_same(ttl: Any) -> None:
    with db_lock("a") as lease:
        before = lease.deadline
        with pytest.raises((TypeError, ValueError), match="ttl"):
            lease.extend(ttl)
        assert lease.deadline == before
        assert not lease.lost


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 1},
        {"ttl": timedelta(seconds=30)},
        {"timeout": 0},
        {"timeout": None},
        {"timeout": timedelta(0)},
        {"max_hold": 1},
        {"min_hold": 0.001},
        {"label": "x" * 200},
        {"label": 'naïve "quotes" 100%'},
        {"metadata": {}},
        {"metadata": {"run": [1, 2.5, None, True, {"ü": "🔒"}]}},
        # A backslash and six characters, not U+0000.
        {"metadata": {"pattern": r"\u0000"}},
        {"on_lost": print},
        {"renew": False, "until_commit": False},
    ],
)
def test_what_is_allowed_is_taken(options: dict[str, Any]) -> None:
    with db_lock("a", **options) as lease:
        assert lease.keys == ("a",)
        assert holders() == ["a"]


def test_metadata_is_what_it_was_when_the_lock_was_written_down() -> None:
    metadata = {"run": 1}
    lock = db_lock("a", metadata=metadata)
    metadata["run"] = 2
    with lock:
        (holder,) = locks["default"].holders()
        assert holder.metadata == {"run": 1}


def test_a_max_hold_shorter_than_the_ttl_shortens_the_lease() -> None:
    with db_lock("a", max_hold=2) as lease:
        assert 1 < lease.ttl <= 2
        assert lease.remaining < 2


def test_the_same_key_twice_is_one_key_and_keys_are_taken_in_one_order() -> None:
    with db_lock("b", "a", "b") as lease:
        assert lease.keys == ("a", "b")
        assert set(lease.fencing_tokens) == {"a", "b"}
        with pytest.raises(ValueError, match="has 2 keys, each with a token: use fencing_tokens"):
            _ = lease.fencing_token


def test_the_lock_shows_its_keys_and_backend() -> None:
    assert repr(db_lock("a", "b", backend="memory")) == "db_lock('a', 'b', backend='memory')"


# With on_held, in `with` and elsewhere


@pytest.mark.parametrize("on_held", ["skip", lambda timeout: None])
def test_a_block_cannot_be_skipped(on_held: Any) -> None:
    with (
        pytest.raises(TypeError, match="a `with` block cannot be skipped"),
        db_lock("a", on_held=on_held),
    ):
        pytest.fail("the body ran")
    assert holders() == []


async def test_nor_can_an_asynchronous_one() -> None:
    with pytest.raises(TypeError, match="a `with` block cannot be skipped"):
        async with db_lock("a", on_held="skip"):
            pytest.fail("the body ran")


def test_a_callable_key_needs_a_call() -> None:
    lock = db_lock(lambda order: f"order:{order}")
    for attempt in (lock.acquire, lock.try_acquire, lock.__enter__):
        with pytest.raises(TypeError, match="only a decorated call can resolve"):
            attempt()


async def test_on_an_event_loop_the_blocking_verbs_name_their_twins() -> None:
    lock = db_lock("a")

    @lock
    def locked() -> None:
        pytest.fail("the body ran")

    with pytest.raises(SynchronousOnlyOperation, match="async with"):
        lock.acquire()
    with pytest.raises(SynchronousOnlyOperation, match="atry_acquire"):
        lock.try_acquire()
    with pytest.raises(SynchronousOnlyOperation, match="async with"), lock:
        pytest.fail("the body ran")
    with pytest.raises(SynchronousOnlyOperation, match="make it `async def`"):
        locked()
    async with lock as lease:
        for verb in (lease.release, lease.extend):
            with pytest.raises(SynchronousOnlyOperation, match=f"a{verb.__name__}"):
                verb()
        assert not lease.lost
    assert holders() == []


# As decorator


def test_a_key_is_formatted_from_the_calls_arguments() -> None:
    seen = []

    @db_lock("order:{order_id}:{kind}:{rest[0]}:{more[size]:03d}")
    def handle(order_id: int, *rest: str, kind: str = "new", **more: int) -> str:
        seen.extend(holders())
        return "done"

    assert handle(42, "x", size=7) == "done"
    assert seen == ["order:42:new:x:007"]
    assert handle.__name__ == "handle"


def test_a_method_uses_its_object() -> None:
    class Order:
        pk = 7

        @db_lock("order:{self.pk}")
        def ship(self) -> list[str]:
            return holders()

        @db_lock("orders:{cls.__name__}")
        @staticmethod
        def plain(cls: type) -> list[str]:
            return holders()

        @classmethod
        @db_lock("orders:{cls.__name__}")
        def archive(cls) -> list[str]:
            return holders()

    assert Order().ship() == ["order:7"]
    assert Order.archive() == ["orders:Order"]


def test_a_callable_gives_the_key() -> None:
    @db_lock(lambda order, **_: f"order:{order['id']}", "stock")
    def handle(order: dict[str, int], dry_run: bool = False) -> list[str]:
        return holders()

    assert handle({"id": 5}, dry_run=True) == ["order:5", "stock"]


def test_braces_are_literal_where_nothing_is_decorated_and_doubled_where_it_is() -> None:
    with db_lock("{order}") as lease:
        assert lease.keys == ("{order}",)

    @db_lock("{{order}}")
    def handle() -> list[str]:
        return holders()

    assert handle() == ["{order}"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("order:{id}", "names the argument 'id', which the function does not have. It has: order"),
        ("order:{}", "names the argument ''"),
        ("order:{0}", "names the argument '0'"),
        ("order:{orders[0].pk}", "names the argument 'orders'"),
        ("order:{order:{width}}", "names the argument 'width'"),
        ("order:{order", "is no format string"),
        ("order:}", "is no format string"),
        ("order:{order!x}", "'order:{order!x}'"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_decorating(template: str, words: str) -> None:
    def handle(order: int) -> None:
        pass

    with pytest.raises(ValueError, match="handle") as caught:
        db_lock(template)(handle)
    assert words in str(caught.value)
    assert template in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "error", "words"),
    [
        ("", ValueError, "must not be empty"),
        ("x" * 201, ValueError, "has 201 characters"),
        ("a\tb", ValueError, "the control character U+0009"),
    ],
)
def test_a_key_made_from_arguments_is_checked_like_any_other(
    argument: str, error: type[Exception], words: str
) -> None:
    @db_lock("{name}")
    def handle(name: str) -> None:
        pytest.fail("the body ran")

    with pytest.raises(error, match="lock key") as caught:
        handle(argument)
    assert words in str(caught.value)


@pytest.mark.parametrize("made", [None, 42, b"order"])
def test_a_callable_must_make_a_key(made: Any) -> None:
    @db_lock(lambda: made)
    def handle() -> None:
        pytest.fail("the body ran")

    with pytest.raises(TypeError, match="must be a str"):
        handle()


def test_a_call_with_wrong_arguments_takes_no_lock() -> None:
    @db_lock("order:{order}")
    def handle(order: int) -> None:
        pytest.fail("the body ran")

    with pytest.raises(TypeError, match="order"):
        handle()  # type: ignore[call-arg]
    assert holders() == []


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator])
def test_generators_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) is a generator"):
        db_lock("a")(function)


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_with_some_arguments_given_is_still_one(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="is a generator"):
        db_lock("a")(functools.partial(function))


def test_a_function_with_some_arguments_given_is_decorated_like_any_other() -> None:
    def handle(order: int, kind: str) -> list[str]:
        return holders()

    handle_new = db_lock("order:{order}:{kind}")(functools.partial(handle, kind="new"))
    assert handle_new(42) == ["order:42:new"]


@pytest.mark.parametrize("thing", [dict, object(), None, "function"])
def test_what_is_no_function_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="decorates functions"):
        db_lock("a")(thing)


def test_who_comes_second_is_told_skipped_or_answered() -> None:
    def calls(on_held: Any) -> Callable[[], Any]:
        @db_lock("a", timeout=0, on_held=on_held)
        def call() -> str:
            return "ran"

        return call

    with db_lock("a", label="nightly"):
        with pytest.raises(LockTimeout, match=r"'a' could not be had at once: .*\(nightly\)"):
            calls("raise")()
        assert calls("skip")() is None
        assert calls(lambda timeout: timeout.holders[0].label)() == "nightly"
    assert calls("skip")() == "ran"


def test_a_timeout_raised_by_the_body_is_the_bodys_own() -> None:
    @db_lock("a", timeout=0, on_held="skip")
    def call() -> None:
        raise LockTimeout("inner")

    with pytest.raises(LockTimeout, match="inner"):
        call()
    assert holders() == []


async def test_a_coroutine_function_stays_one() -> None:
    @db_lock("order:{order}", on_held="skip", timeout=0)
    async def handle(order: int) -> list[str]:
        return [holder.key for holder in locks["default"].holders()]

    assert await handle(3) == ["order:3"]
    async with db_lock("order:3"):
        assert await handle(3) is None
        assert await handle(4) == ["order:3", "order:4"]


def test_an_unknown_alias_is_refused_when_the_lock_is_used() -> None:
    lock = db_lock("a", backend="nowhere")
    with pytest.raises(ImproperlyConfigured, match="no lock backend 'nowhere'"):
        lock.acquire()


# Claims


def test_shared_and_a_limit_are_two_things() -> None:
    with pytest.raises(TypeError, match="not both"):
        db_lock("a", shared=True, limit=3)


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_a_limit_out_of_bounds_is_refused_with_the_bounds(limit: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 10000"):
        db_lock("a", limit=limit)


@pytest.mark.parametrize("limit", [True, 2.0, "3"])
def test_a_limit_that_is_no_number_is_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match="limit must be an int"):
        db_lock("a", limit=limit)


@pytest.mark.parametrize(
    ("lock", "what"),
    [
        (db_lock("a", shared=True), "shared locks"),
        (db_lock("a", limit=2), "permits"),
        (db_lock(("a", "b")), "tree keys"),
    ],
)
def test_a_store_that_has_no_such_claims_says_so(
    lock: db_lock, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_locks():
        for name in ("shared", "permits", "tree_keys"):
            monkeypatch.setattr(type(locks["default"]), f"supports_{name}", False)
        with pytest.raises(NotSupported, match=what):
            lock.acquire()
        db_lock("a").acquire().release()


def test_parts_of_a_tree_key_are_templates_too() -> None:
    @db_lock(("customer:{order.customer}", "order:{order.number}"))
    def ship(order: Any) -> list[Any]:
        return [holder.key for holder in locks["default"].holders()]

    class Order:
        customer, number = 7, 42

    with memory_locks():
        assert ship(Order()) == ["customer:7", ("customer:7", "order:42")]
    with pytest.raises(ValueError, match="names the argument 'nr'"):

        @db_lock(("customer:7", "order:{nr}"))
        def other(number: int) -> None: ...
