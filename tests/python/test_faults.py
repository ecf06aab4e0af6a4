"""Case F3 of docs/reliability.md: the transport of P fails, by kvpush.testing.faults."""

import pytest
from engines import DIGEST, TRANSPORTS, Pair, pair, wait_for

import kvpush
from kvpush.testing import faults

SMALL = {"slot_bytes": 4096, "num_slots": 2, "peer_timeout_s": 2.0}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", ["fail_post_before", "fail_post_after", "lose_at_send"])
def test_case_f3_a_box_cannot_be_sent(fault, transport):
    whole = pair(transport, config=SMALL, blocks=256)
    with faults(**{fault: 4}):
        broken = kvpush.Engine(whole.p._cache, whole.p.config)
    whole.p.close()
    with Pair(broken, whole.d, whole.source, whole.target) as t:
        push = t.p.push("k", digest=DIGEST)
        recv = t.d.receive(t.peer, "k", digest=DIGEST, blocks=[range(200)])
        push.advance([range(200)])
        assert wait_for(t.d, recv.handle).status in ("peer_lost", "peer_closed")
        assert wait_for(t.p, push.handle).status in ("transport", "peer_lost")
        # Both live, and a new session serves.
        peer = t.d.establish(t.p.answer(t.d.offer()))
        push = t.p.push("again", digest=DIGEST)
        recv = t.d.receive(peer, "again", digest=DIGEST, blocks=[[5, 6]])
        push.advance([[7, 8]])
        push.finish()
        assert wait_for(t.d, recv.handle).kind == "received"
        assert (t.target[0][0][[5, 6]] == t.source[0][0][[7, 8]]).all()


def test_an_unknown_fault_is_an_error():
    with pair("shm") as t, pytest.raises(kvpush.InvalidArgument, match="'no_such' is unknown"):
        kvpush._core.Engine(t.p._cache.to_core(), t.p.config.to_core() | {"faults": {"no_such": 1}})
