"""Transfers that fail: D follows its policy, and both engines serve on."""

import pytest
from pairs import Pair, both_transports
from tiny import prompt


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["other prompt", "one token more", "never pushed", "given up", "no peer"])
def test_a_failed_transfer_follows_the_policy(pair: Pair, fault: str, policy: str, deaf: int) -> None:
    pair.d.call("policy", policy)
    key, ids = pair.key(), prompt(200, 21)
    if fault == "other prompt":
        pair.prefill(key, prompt(200, 22))
    elif fault == "one token more":
        pair.prefill(key, [*ids, 7])
    elif fault == "given up":
        pair.prefill(key, ids)
        pair.p.wait(key)
        pair.p.settle()
    pair.decode(key, ids, port=deaf if fault == "no peer" else None)
    pair.check_failed(policy, key, ids)
    expected = {
        "other prompt": "digest_mismatch",
        "one token more": "digest_mismatch",
        "never pushed": "pairing_timeout",
        "given up": "unclaimed",
        "no peer": "handshake_failed",
    }
    assert [record["status"] for record in pair.d.trace(key)] == [expected[fault]]
    if fault in ("other prompt", "one token more"):
        pair.p.wait(key)
    pair.settle()
    pair.serves()


def test_case_f11_prefill_that_nobody_needs_is_told_so(pair: Pair) -> None:
    pair.serves()
    key, ids = pair.key(), prompt(200, 23)
    pair.prefill(key, ids)
    pair.p.wait(key)
    pair.d.add(key, ids, 8, pair.d_leg(key), prompt_logprobs=1)
    pair.check(key, ids)
    pair.p.settle()
    assert [record["status"] for record in pair.p.trace(key)] == ["cancelled"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@both_transports
def test_case_f3_a_box_of_prefill_cannot_be_sent(pair: Pair, policy: str) -> None:
    """Refused by the transport; not written; written, yet of unknown fate: each in its own session."""
    # Without the boxes that measure a session, whose number would change what is counted.
    pair.replace_prefill(
        faults={"lose_at_send": 6, "fail_post_before": 8, "fail_post_after": 14},
        env={"KVPUSH_MIN_LINK_GB_PER_S": "0"},
    )
    pair.d.call("policy", policy)
    for seed in (71, 72, 73):
        key, ids = pair.key(), prompt(700, seed)
        pair.decode(key, ids)
        pair.prefill(key, ids)
        pair.p.wait(key)
        pair.check_failed(policy, key, ids)
        pair.p.until(lambda _, key=key: pair.p.trace(key))
        (record,) = pair.p.trace(key)
        assert record["status"] == "transport"
    pair.serves()
    if pair.transport == "nixl":
        # What a post of unknown fate may still read or write is set aside until P's process is gone.
        assert pair.p.state()["stats"]["quarantined_bytes"] > 0
        pair.replace_prefill()
