"""Engines over two rails of a real libfabric on loopback."""

from __future__ import annotations

import numpy as np
import pytest
from engines import DIGEST, FABRICS, pair, wait

import kvpush

RAILS = ("127.0.0.1", "127.0.0.2")


def over(rails: tuple[str, ...]) -> dict:
    # Of libfabric 1.17 "tcp" is tcp;ofi_rxm.
    return {"fabric_provider": "tcp", "fabric_rails": rails}


@pytest.mark.parametrize("fabric", FABRICS)
def test_large_boxes_arrive_over_two_rails(fabric):
    config = {**over(RAILS), "slot_bytes": 1 << 20}
    with pair(fabric, config=config, num_planes=2, blocks=64, tokens=64, content=64) as both:
        blocks = list(range(64))
        push = both.p.push("k", digest=DIGEST)
        receive = both.d.receive(both.peer, "k", digest=DIGEST, blocks=[blocks])
        push.advance([blocks])
        push.finish()
        event = wait(both.d)[0]
        assert (event.kind, event.handle) == ("received", receive.handle), event
        for sent, received in zip(both.source[0], both.target[0], strict=True):
            np.testing.assert_array_equal(sent, received)


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rail_that_is_not_there_is_named(fabric):
    with pytest.raises(kvpush.Unsupported, match="no 'ib99' here"):
        pair(fabric, config=over(("127.0.0.1", "ib99")))
