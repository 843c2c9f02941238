from tests.integration.contract.stores import (  # noqa: F401
    gate,
    moved_clock,
    pytest_generate_tests,
    pytest_pyfunc_call,
    start,
    stop,
    store,
    told,
)
