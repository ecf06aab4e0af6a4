import pytest
from network import LossyNetwork, Network, made
from workers import Pool, Worker

# Of one block 256 KiB, so that a transfer takes a while and a slot holds few.
CONTENT = 8192
# Silence is judged late: on a busy machine so many bytes leave a process waiting for long.
CONFIG = {"slot_bytes": 1 << 20, "num_slots": 4, "peer_timeout_s": 1.6}


def _pool(network: Network, **config) -> Pool:
    def make(transport: str, is_source: bool) -> Worker:
        program = str(network.programs["p" if is_source else "d"])
        return Worker(transport, is_source, CONTENT, program, **{**CONFIG, **config})

    return Pool(make)


@pytest.fixture(scope="module")
def one_network(tmp_path_factory):
    with made(Network, tmp_path_factory.mktemp("netns")) as network:
        network.pool = _pool(network)
        yield network
        network.pool.close()


@pytest.fixture
def network(one_network):
    """Namespaces and their workers; the links are up."""
    yield one_network
    one_network.set_links(up=True)


@pytest.fixture(scope="module")
def two_rail_network(tmp_path_factory):
    with made(Network, tmp_path_factory.mktemp("rails"), num_rails=2) as network:
        # A link that is silent ends nothing by itself: what waits for it does so at most this long.
        network.pool = _pool(network, fabric_rails=("rail0", "rail1"), progress_timeout_s=2.0)
        yield network
        network.pool.close()


@pytest.fixture
def rails(two_rail_network):
    """As `network`, with two links that transport fabric takes as its rails."""
    yield two_rail_network
    two_rail_network.set_links(up=True)


@pytest.fixture
def lossy(tmp_path):
    with made(LossyNetwork, tmp_path) as network:
        # Loss alone is no death: several losses of one segment take TCP a second or more.
        network.pool = _pool(network, peer_timeout_s=10.0)
        yield network
        network.pool.close()
