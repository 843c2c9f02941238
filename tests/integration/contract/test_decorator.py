"""What the decorator does on every store."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import LeaseLost, LockTimeout
from tests.integration.contract.stores import Store, for_stores


class TestKeys:
    def test_a_plain_key(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work() -> str:
            return store.owner(key)

        assert work()
        assert store.is_free(key)

    def test_from_the_calls_arguments(self, store: Store, key: str) -> None:
        @store.lock(key + ":{order}:{kind}:{rest[0]}:{more[x]}", timeout=0)
        def work(order: int, *rest: str, kind: str = "retail", **more: int) -> list[str]:
            return [one.key for one in store.backend.holders(key)]

        assert work(42, "a", "b", x=1) == [f"{key}:42:retail:a:1"]
        assert work(7, "c", kind="bulk", x=2) == [f"{key}:7:bulk:c:2"]

    def test_defaults_are_arguments_too(self, store: Store, key: str) -> None:
        @store.lock(key + ":{order}", timeout=0)
        def work(order: int = 3) -> list[str]:
            return [one.key for one in store.backend.holders(key)]

        assert work() == [f"{key}:3"]
        assert work(4) == [f"{key}:4"]
        assert work(order=5) == [f"{key}:5"]

    def test_of_a_method_from_self(self, store: Store, key: str) -> None:
        class Order:
            def __init__(self, pk: int) -> None:
                self.pk = pk

            @store.lock(key + ":{self.pk}:{step!r}:{size:03d}", timeout=0)
            def ship(self, step: str, size: int = 7) -> list[str]:
                return [one.key for one in store.backend.holders(key)]

            @classmethod
            @store.lock(key + ":{cls.__name__}", timeout=0)
            def count(cls) -> list[str]:
                return [one.key for one in store.backend.holders(key)]

            @staticmethod
            @store.lock(key + ":{number}", timeout=0)
            def check(number: int) -> list[str]:
                return [one.key for one in store.backend.holders(key)]

        assert Order(5).ship("pack") == [f"{key}:5:'pack':007"]
        assert Order.count() == [f"{key}:Order"]
        assert Order.check(9) == [f"{key}:9"]

    def test_from_a_callable(self, store: Store, key: str) -> None:
        @store.lock(lambda order, **_: f"{key}:{order['id']}", timeout=0)
        def work(order: dict[str, int], **more: int) -> list[str]:
            return [one.key for one in store.backend.holders(key)]

        assert work({"id": 8}, x=1) == [f"{key}:8"]

    def test_several(self, store: Store, key: str) -> None:
        @store.lock(key + ":{b}", lambda a, b: f"{key}:{a}", timeout=0)
        def work(a: int, b: int) -> list[str]:
            return [one.key for one in store.backend.holders(key)]

        assert work(2, 1) == [f"{key}:1", f"{key}:2"]
        assert work(1, 1) == [f"{key}:1"], "twice the same is once"

    def test_calls_with_different_keys_do_not_meet(self, store: Store, key: str) -> None:
        @store.lock(key + ":{depth}", timeout=0)
        def nest(depth: int) -> int:
            return depth if depth == 3 else nest(depth + 1)

        assert nest(0) == 3

    @for_stores(("memory",))
    def test_a_key_that_is_none_when_called_is_refused(self, store: Store, key: str) -> None:
        ran = []

        @store.lock(lambda name: name, timeout=0)
        def work(name: Any) -> None:
            ran.append(name)

        for wrong, error in ((b"x", TypeError), ("", ValueError), (None, TypeError)):
            with pytest.raises(error, match="lock key"):
                work(wrong)
        assert ran == []

    @for_stores(("memory",))
    def test_an_argument_that_there_is_not_is_refused_when_decorating(
        self, store: Store, key: str
    ) -> None:
        def work(order: int) -> None: ...

        with pytest.raises(ValueError, match=r"'invoice'.*It has: order"):
            store.lock(key + ":{invoice}")(work)
        with pytest.raises(ValueError, match="format string"):
            store.lock(key + ":{order")(work)
        with pytest.raises(ValueError, match=r"argument"):
            store.lock(key + ":{}")(work)

    @for_stores(("memory",))
    def test_wrong_arguments_are_the_callers_error(self, store: Store, key: str) -> None:
        @store.lock(key + ":{order}", timeout=0)
        def work(order: int) -> None: ...

        with pytest.raises(TypeError, match="order"):
            work()  # type: ignore[call-arg]


class TestCall:
    def test_arguments_and_result_pass_through(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work(a: int, /, b: int, *rest: int, c: int, **more: int) -> tuple[Any, ...]:
            """What it does."""
            return a, b, rest, c, more

        assert work(1, 2, 3, c=4, d=5) == (1, 2, (3,), 4, {"d": 5})
        assert work.__name__ == "work"
        assert work.__doc__ == "What it does."
        assert list(inspect.signature(work).parameters) == ["a", "b", "rest", "c", "more"]

    async def test_of_an_async_function_too(self, store: Store, key: str) -> None:
        @store.lock(key + ":{a}", timeout=0)
        async def work(a: int, *, b: int = 2) -> tuple[int, int, str]:
            await asyncio.sleep(0)
            return a, b, store.owner(f"{key}:{a}")

        assert inspect.iscoroutinefunction(work)
        a, b, owner = await work(1)
        assert (a, b) == (1, 2)
        assert owner
        assert store.is_free(f"{key}:1")

    async def test_of_an_async_method(self, store: Store, key: str) -> None:
        class Order:
            pk = 5

            @store.lock(key + ":{self.pk}", timeout=0)
            async def ship(self) -> str:
                return store.owner(f"{key}:5")

        assert await Order().ship()
        assert store.is_free(f"{key}:5")

    def test_each_call_has_a_lease_of_its_own(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work() -> str:
            return store.owner(key)

        assert len({work(), work(), work()}) == 3

    def test_an_error_is_the_functions_own(self, store: Store, key: str) -> None:
        error = RuntimeError("of the function")

        @store.lock(key, timeout=0)
        def work(lose: bool) -> None:
            if lose:
                store.backend.force_release(key)
            raise error

        for lose in (False, True):
            with pytest.raises(RuntimeError) as caught:
                work(lose)
            assert caught.value is error
            assert store.is_free(key)

    async def test_of_an_async_function_as_well(self, store: Store, key: str) -> None:
        error = RuntimeError("of the function")

        @store.lock(key, timeout=0)
        async def work(lose: bool) -> None:
            if lose:
                store.aside(lambda: store.backend.force_release(key))
            raise error

        for lose in (False, True):
            with pytest.raises(RuntimeError) as caught:
                await work(lose)
            assert caught.value is error
            assert store.is_free(key)

    def test_a_lease_lost_meanwhile_is_an_error(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work() -> str:
            store.backend.force_release(key)
            return "done"

        with pytest.raises(LeaseLost):
            work()

    async def test_in_an_async_function_as_well(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        async def work() -> str:
            store.aside(lambda: store.backend.force_release(key))
            return "done"

        with pytest.raises(LeaseLost):
            await work()

    def test_a_held_key_is_waited_for(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        @store.lock(key, timeout=20)
        def work() -> str:
            return "done"

        lease = store.hold(key)
        call = start(work)
        lease.release()
        assert call.result(10) == "done"


class TestOnHeld:
    @pytest.fixture(autouse=True)
    def rival(self, store: Store, key: str) -> str:
        return store.hold(key, label="rival").owner_id

    def test_it_raises(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work() -> None:
            pytest.fail("the function ran")

        with pytest.raises(LockTimeout, match="rival"):
            work()

    def test_it_skips(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0, on_held="skip")
        def work() -> str:
            pytest.fail("the function ran")

        assert work() is None

    def test_it_asks_what_to_answer(self, store: Store, key: str, rival: str) -> None:
        @store.lock(key, timeout=0, on_held=lambda timeout: (type(timeout), timeout.holders))
        def work() -> Any:
            pytest.fail("the function ran")

        kind, (holder,) = work()
        assert kind is LockTimeout
        assert (holder.key, holder.owner_id) == (key, rival)

    def test_what_is_asked_may_raise(self, store: Store, key: str) -> None:
        def give_up(timeout: LockTimeout) -> None:
            raise RuntimeError("busy") from timeout

        @store.lock(key, timeout=0, on_held=give_up)
        def work() -> None:
            pytest.fail("the function ran")

        with pytest.raises(RuntimeError, match="busy"):
            work()

    async def test_in_async_functions_as_well(self, store: Store, key: str) -> None:
        async def work() -> str:
            pytest.fail("the function ran")

        with pytest.raises(LockTimeout):
            await store.lock(key, timeout=0)(work)()
        assert await store.lock(key, timeout=0, on_held="skip")(work)() is None
        answer: Any = store.lock(key, timeout=0, on_held=lambda timeout: timeout.keys)(work)
        assert await answer() == (key,)

    def test_a_timeout_of_the_function_itself_is_not_caught(self, store: Store, key: str) -> None:
        """Only a lock that this very call could not have is "held"."""

        @store.lock(f"{key}:other", timeout=0, on_held="skip")
        def work() -> None:
            store.lock(key, timeout=0).acquire()

        with pytest.raises(LockTimeout):
            work()

    @for_stores(("memory",))
    @pytest.mark.parametrize("on_held", ["ignore", None, 1])
    def test_anything_else_is_refused(self, store: Store, key: str, on_held: Any) -> None:
        with pytest.raises(ValueError, match="on_held"):
            store.lock(key, on_held=on_held)


@for_stores(("memory",))
class TestRefused:
    def test_generators(self, store: Store, key: str) -> None:
        def generate() -> Iterator[int]:
            yield 1

        async def agenerate() -> AsyncIterator[int]:
            yield 1

        for function in (generate, agenerate):
            with pytest.raises(TypeError, match="generator"):
                store.lock(key)(function)

    def test_what_is_no_function(self, store: Store, key: str) -> None:
        class Order: ...

        for wrong in (Order, "work", 42):
            with pytest.raises(TypeError, match="decorates functions"):
                store.lock(key)(wrong)  # type: ignore[arg-type]
