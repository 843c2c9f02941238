from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.integration.contract.stores import (  # noqa: F401
    Store,
    pytest_generate_tests,
    start,
    store,
)


@pytest.fixture
def explore(store: Store) -> Callable[..., None]:  # noqa: F811
    """`explore(Machine, steps, max_examples=…)`: runs of so many steps, each on the store."""

    def explore(
        machine: Callable[[Any], RuleBasedStateMachine], steps: int, **options: Any
    ) -> None:
        run_state_machine_as_test(
            lambda: machine(store),
            settings=settings(
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                stateful_step_count=steps,
                **options,
            ),
        )

    return explore
