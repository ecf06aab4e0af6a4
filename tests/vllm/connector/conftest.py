from collections.abc import Iterator

import pytest
from harness import Pair
from tiny import free_port


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(free_port())
    yield pair
    pair.close()
