"""Many short requests, some given up."""

import os
import random

import pytest
from pairs import Pair
from tiny import prompt

SOAK = int(os.environ.get("KVPUSH_SOAK", "300"))


@pytest.mark.timeout(300 + SOAK)
def test_soak(pair: Pair) -> None:
    """``KVPUSH_SOAK`` short requests, sixteen at a time, one in ten aborted on a side, or on both."""
    rng = random.Random(11)
    prompts = [prompt(rng.randint(1, 150), 300 + i) for i in range(40)]
    expected = [pair.expect(ids, 4) for ids in prompts]
    open_keys: list[tuple[str, int]] = []
    received = 0
    for i in range(SOAK):
        key, which = pair.key(), rng.randrange(len(prompts))
        legs = [(pair.prefill, 1), (pair.decode, 4)]
        for leg, max_tokens in rng.sample(legs, 2):
            leg(key, prompts[which], max_tokens)
        if rng.random() < 0.1:
            for node in rng.choice([(pair.p,), (pair.d,), (pair.p, pair.d)]):
                if rng.random() < 0.7:
                    node.call("step", rng.randint(0, 3))
                node.call("abort", [key])
            continue
        open_keys.append((key, which))
        while len(open_keys) >= (16 if i < SOAK - 1 else 1):
            done, which = open_keys.pop(0)
            assert pair.d.wait(done)[done]["tokens"] == [expected[which]]
            pair.p.wait(done)
            received += 1
    assert received > SOAK // 2
    pair.settle()
    pair.serves()
