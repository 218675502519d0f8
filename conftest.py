"""Settings for the whole test-suite: hypothesis profiles, and how many random layouts the oracle sees.

pytest                                                              20,000 layouts, profile ci
pytest tests/core/test_oracle.py --layouts 200000                   thorough
pytest --hypothesis-profile thorough                                10 times the examples everywhere
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=1000)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options above."""
    parser.addoption("--layouts", type=int, default=None, help="random layouts for the oracle: 20,000 by default")
    parser.addoption("--first-layout", type=int, default=0, help="seed of the first of them")


@pytest.fixture(scope="session")
def layouts(request: pytest.FixtureRequest) -> range:
    """Seeds of the random layouts."""
    thorough = request.config.getoption("--hypothesis-profile", None) == "thorough"
    first = request.config.getoption("--first-layout")
    return range(first, first + (request.config.getoption("--layouts") or (200_000 if thorough else 20_000)))
