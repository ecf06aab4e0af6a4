"""Real engines, real kvpush, over each transport: the tokens are those of one engine alone."""

from typing import Any

from pairs import Pair, both_transports
from tiny import BLOCK_SIZE, prompt


def run(pair: Pair, prompts: dict[str, list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
    """All prompts on both sides at once; returns D's records of the transfers."""
    for key, ids in prompts.items():
        pair.decode(key, ids, max_tokens)
        pair.prefill(key, ids)
    pair.check_received(prompts, max_tokens)
    for key, out in pair.p.wait(*prompts).items():
        assert out["tokens"] == [pair.expect(prompts[key], 1)]
        assert out["params"]["transfer_mode"] == "push"
    return [record for key in prompts for record in pair.d.trace(key)]


def units(record: dict[str, Any]) -> int:
    """Blocks that a transfer moved (the model has 3 planes)."""
    return int(record["per_block_descriptors"]) // 3


@both_transports
def test_a_prompt_within_one_chunk(pair: Pair) -> None:
    for length in (1, 20, BLOCK_SIZE, 100):
        (record,) = run(pair, {pair.key(): prompt(length, length)})
        assert units(record) == -(-length // BLOCK_SIZE)


@both_transports
def test_a_prompt_of_several_chunks(pair: Pair) -> None:
    (record,) = run(pair, {pair.key(): prompt(700, 1)}, max_tokens=16)
    assert units(record) == 22


@both_transports
def test_sixteen_at_once(pair: Pair) -> None:
    run(pair, {pair.key(): prompt(15 + 23 * i, 100 + i) for i in range(16)})


@both_transports
def test_a_prefix_that_decode_holds_is_not_sent_again(pair: Pair) -> None:
    ids = prompt(300, 50)
    records = [run(pair, {pair.key(): part})[0] for part in (ids[:160], ids, ids, ids + prompt(100, 51))]
    # All blocks, then those after the held ones; the block of the last token is always needed.
    assert [units(record) for record in records] == [5, 5, 1, 4]
