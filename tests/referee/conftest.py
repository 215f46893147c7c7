"""One pair of tables for all tests of the referee."""

from __future__ import annotations

import pytest

from forerun.referee.tables import Pair, make_pair


@pytest.fixture(scope="session")
def pair() -> Pair:
    return make_pair(0)
