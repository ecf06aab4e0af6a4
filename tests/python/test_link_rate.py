"""A session's path is measured when it opens, and a slow one is told of (case B6)."""

import pytest
from engines import DIGEST, Pair, pair, wait_for

import kvpush


def stats_of_p_after_one_block(both: Pair) -> dict:
    push = both.p.push("k", DIGEST)
    push.advance([[1]])
    push.finish()
    receive = both.d.receive(both.peer, "k", digest=DIGEST, blocks=[[2]])
    assert wait_for(both.d, receive.handle).kind == "received"
    return both.p.stats()


@pytest.mark.nixl
@pytest.mark.parametrize("floor", [1e6, 1e-6, 0.0], ids=["slow", "fast", "off"])
def test_case_b6_the_rate_is_said_at_connect(floor: float, capfd: pytest.CaptureFixture[str]) -> None:
    with pair("nixl", config={"min_link_gb_per_s": floor}) as both:
        stats = stats_of_p_after_one_block(both)
    assert (stats["link_bytes_per_s"] > 0) == (floor > 0)
    assert stats["slow_links"] == (floor > 1)
    assert stats["network_ops"] == stats["boxes_sent"]
    told = [line for line in capfd.readouterr().err.splitlines() if "GB/s" in line]
    assert len(told) == (floor > 1)
    for line in told:
        assert line.startswith("kvpush warning: session ")
        assert "over nixl" in line
        assert f"{stats['link_bytes_per_s'] / 1e9:.2f} GB/s" in line
        assert "min_link_gb_per_s (1000000.00 GB/s)" in line


def test_case_b6_there_is_nothing_to_measure_in_mapped_memory(capfd: pytest.CaptureFixture[str]) -> None:
    with pair("shm", config={"min_link_gb_per_s": 1e6}) as both:
        stats = stats_of_p_after_one_block(both)
    assert stats["link_bytes_per_s"] == stats["slow_links"] == 0
    assert "GB/s" not in capfd.readouterr().err


def test_a_rate_must_not_be_negative() -> None:
    with pytest.raises(kvpush.InvalidArgument, match=r"min_link_gb_per_s=-1.*from 0 to"):
        kvpush.Config(min_link_gb_per_s=-1)
