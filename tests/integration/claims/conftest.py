from tests.integration.contract.stores import pytest_generate_tests, start, store  # noqa: F401
