"""Engines that are killed, and others in their place."""

import pytest
from pairs import LONG, Pair
from tiny import prompt


@pytest.mark.parametrize(
    ("pair", "policy"),
    [("shm", "recompute"), ("shm", "fail"), pytest.param("nixl", "recompute", marks=pytest.mark.nixl)],
    indirect=["pair"],
)
def test_case_f5_prefill_dies_and_comes_back(pair: Pair, policy: str) -> None:
    pair.serves()
    pair.d.call("policy", policy)
    prompts = {pair.key(): prompt(500, 31 + i) for i in range(4)}
    waiting, coming, running, late = prompts
    # In mid-transfer, known to both but not begun, known to D alone, and asked for after the death.
    pair.start_transfer(running, prompts[running])
    pair.decode(coming, prompts[coming])
    pair.prefill(coming, prompts[coming])
    pair.decode(waiting, prompts[waiting])
    pair.d.until(lambda state: state["stats"]["open_receives"] == 3)
    pair.p.kill()
    pair.decode(late, prompts[late])
    for key, ids in prompts.items():
        pair.check_failed(policy, key, ids)
    pair.d.settle()
    pair.restart("kv_producer")
    pair.serves()


def test_case_f6_decode_dies_again_and_again(pair: Pair) -> None:
    for _ in range(3):
        held, running, waiting = pair.key(), pair.key(), pair.key()
        pair.d.call("pause")
        for key in (held, running, waiting):
            pair.decode(key, LONG)
        pair.d.call("step", 1)
        pair.d.call("resume")
        pair.d.until(lambda state: state["stats"]["open_receives"] == 3)
        pair.d.call("pause")
        pair.p.call("pause")
        pair.prefill(running, LONG)
        pair.p.call("step", 3)
        pair.prefill(held, prompt(200, 5))
        pair.d.kill()
        pair.p.call("resume")
        pair.restart("kv_consumer")
        pair.serves()
        pair.p.wait(held, running)
    pair.p.settle()


def test_a_claim_that_ends_before_the_first_hand_shake(pair: Pair) -> None:
    pair.d.kill()
    pair.restart("kv_consumer")
    key = pair.key()
    pair.prefill(key, LONG)
    pair.p.wait(key)
    pair.d.call("pause")
    pair.decode(key, LONG)
    pair.d.call("step", 1)
    pair.d.call("abort", [key])
    pair.d.settle()
    pair.p.settle()
    pair.serves()
