"""Errors, as they arrive at the caller and in another process."""

import copy
import inspect
import pickle
from datetime import UTC, datetime

import pytest
from django.core.exceptions import ImproperlyConfigured

import distlocks
from distlocks import DistlocksError, LockTimeout, exceptions
from distlocks.claims import Holder
from distlocks.conf import InvalidSetting

HOLDER = Holder(
    key="order:42",
    owner_id="abc",
    fencing_token=7,
    since=datetime(2024, 1, 1, tzinfo=UTC),
    remaining=3.5,
    metadata={"run": [1, 2]},
)
ALL = [
    found
    for _, found in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(found, Exception)
]


def test_all_have_one_base_class_and_are_public() -> None:
    assert {error.__name__ for error in ALL} == {
        "BackendUnavailable",
        "DistlocksError",
        "LeaseLost",
        "LockTimeout",
        "NotSupported",
        "StaleToken",
    }
    for error in ALL:
        assert issubclass(error, DistlocksError)
        assert getattr(distlocks, error.__name__) is error


@pytest.mark.parametrize("error", ALL)
def test_without_a_message_the_docstring_is_the_message(error: type[DistlocksError]) -> None:
    assert str(error()) == error.__doc__
    assert str(error("no such luck")) == "no such luck"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ALL)
def test_an_error_survives_the_way_to_another_process(
    error: type[DistlocksError], protocol: int
) -> None:
    original = error("held elsewhere", keys=("a", "b"))
    original.add_note("seen in a worker")
    arrived = pickle.loads(pickle.dumps(original, protocol))
    assert type(arrived) is error
    assert str(arrived) == "held elsewhere"
    assert arrived.args == original.args
    assert arrived.keys == ("a", "b")
    assert arrived.__notes__ == ["seen in a worker"]


def test_a_timeout_takes_its_holders_along() -> None:
    original = LockTimeout("taken", keys=("order:42",), holders=(HOLDER,))
    for arrived in (pickle.loads(pickle.dumps(original)), copy.copy(original)):
        assert arrived.holders == (HOLDER,)
        assert arrived.keys == ("order:42",)


def test_a_subclass_with_arguments_of_its_own_survives_too() -> None:
    arrived = pickle.loads(pickle.dumps(OrderLocked(42)))
    assert arrived.order == 42
    assert str(arrived) == "order 42 is being changed"
    assert arrived.keys == ("order:42",)


class OrderLocked(LockTimeout):
    def __init__(self, order: int) -> None:
        super().__init__(f"order {order} is being changed", keys=(f"order:{order}",))
        self.order = order


def test_a_lock_timeout_is_caught_as_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        raise LockTimeout
    assert LockTimeout().holders == ()
    # Not taken for an error of the operating system with a number.
    assert LockTimeout("taken").errno is None


def test_a_wrong_setting_is_djangos_kind_of_error_and_survives_the_way_too() -> None:
    original = InvalidSetting(5, "TTL is 0 s.", "Give more.")
    assert isinstance(original, ImproperlyConfigured)
    assert not isinstance(original, DistlocksError)
    assert str(original) == "TTL is 0 s. Give more."
    arrived = pickle.loads(pickle.dumps(original))
    assert str(arrived) == str(original)
    assert (arrived.check_id, arrived.message, arrived.hint) == (
        "distlocks.E005",
        "TTL is 0 s.",
        "Give more.",
    )
