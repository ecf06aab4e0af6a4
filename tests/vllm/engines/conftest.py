import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kvpush._core", reason="the native module is not built")

from pairs import Fleet, Pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("engines"))
    yield fleet
    fleet.close()


@pytest.fixture
def pair(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Engines over shm, or over the transport that the test names; both live and are idle afterwards."""
    pair = fleet.pair(getattr(request, "param", "shm"))
    yield pair
    try:
        pair.settle()
    except BaseException:
        fleet.drop(pair)  # later tests start with new engines
        raise


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a prefill engine that accepts connections and never says a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield int(sock.getsockname()[1])
