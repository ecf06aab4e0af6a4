"""Full caches, preemption, cached prefixes, siblings, queues."""

from pairs import LONG, SETTINGS, WAITING, Pair
from tiny import prompt


def test_prefill_is_preempted(pair: Pair) -> None:
    before = pair.p.state()["preemptions"]
    prompts = {pair.key(): prompt(90 + i, 40 + i) for i in range(4)}
    # Four prompts of three blocks, and thirteen more tokens for all of them: too many.
    pair.p.call("hold", 13)
    pair.p.call("pause")
    pair.d.call("pause")
    for key, ids in prompts.items():
        pair.decode(key, ids)
        pair.prefill(key, ids, max_tokens=40)
    pair.p.call("resume")
    pair.p.until(lambda state: state["preemptions"] > before)
    pair.d.call("resume")
    outputs = pair.p.wait(*prompts)
    for key, ids in prompts.items():
        assert outputs[key]["tokens"] == [pair.expect(ids, 40)]
        pair.check(key, ids)
        assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_case_c4_prefill_is_preempted_in_mid_transfer(pair: Pair) -> None:
    key = pair.key()
    pair.start_transfer(key)
    pair.p.call("preempt", key)
    pair.p.call("resume")
    assert pair.p.wait(key)[key]["tokens"] == [pair.expect(LONG, 1)]
    pair.check(key, LONG)
    assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_four_completions_of_one_prompt(pair: Pair) -> None:
    key, ids = pair.key(), prompt(100, 50)
    pair.d.add(key, ids, 8, pair.d_leg(key), n=4)
    pair.prefill(key, ids)
    pair.p.wait(key)
    assert pair.d.wait(key)[key]["tokens"] == [pair.expect(ids)] * 4
    assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_case_f14_decode_without_room_queues(pair: Pair) -> None:
    prompts = {pair.key(): prompt(60 + i, 60 + i) for i in range(30)}
    pair.d.call("hold", 10)
    for key, ids in prompts.items():
        pair.decode(key, ids)
        pair.prefill(key, ids)
    pair.p.wait(*prompts)
    for key, ids in prompts.items():
        pair.check(key, ids)
        assert [record["kind"] for record in pair.d.trace(key)] == ["received"]


def test_room_for_one_and_opposite_orders(pair: Pair) -> None:
    prompts = {pair.key(): prompt(100, 95 + i) for i in range(2)}
    for node in (pair.p, pair.d):
        node.call("hold", 5)
        node.call("pause")
    for key in prompts:
        pair.decode(key, prompts[key])
    for key in reversed(prompts):
        pair.prefill(key, prompts[key])
    for node in (pair.p, pair.d):
        node.call("resume")
    for key, ids in prompts.items():
        pair.check(key, ids)
    pair.p.wait(*prompts)
    # Each side waited for what the other had no room for, until prefill gave up what nobody had opened.
    first, last = prompts
    assert [record["status"] for record in pair.p.trace(last)] == ["evicted"]
    assert [record["kind"] for record in pair.d.trace(first)] == ["received"]


def test_case_f4_128_requests_wait_longer_than_any_lease(pair: Pair) -> None:
    pair.serves()
    prompts = {pair.key(): prompt(30, 200 + i) for i in range(128)}
    pair.d.call("pause")
    for key, ids in prompts.items():
        pair.decode(key, ids)
    pair.d.call("step", 1)
    for key, ids in prompts.items():
        pair.prefill(key, ids)
    pair.p.wait(*prompts)
    lost = pair.key()
    pair.prefill(lost, prompt(30, 199))
    # By then every time limit of this pair has passed, but those of a claim and of progress.
    pair.p.until(lambda _: [record["status"] for record in pair.p.trace(lost)] == ["unclaimed"])
    pair.p.wait(lost)
    pair.d.call("resume")
    pair.check_received(prompts)


def test_case_f14_256_requests_through_two_slots(pair: Pair) -> None:
    prompts = {pair.key(): prompt(10 + i % 120, 400 + i) for i in range(256)}
    for key, ids in prompts.items():
        pair.decode(key, ids, 2)
        pair.prefill(key, ids)
    state = pair.d.state()
    pair.p.wait(*prompts)
    pair.check_received(prompts, 2)
    after = pair.d.state()["stats"]
    assert after["landing_bytes"] == state["stats"]["landing_bytes"] == 2 * SETTINGS["slot_bytes"]


def test_decode_is_preempted(pair: Pair) -> None:
    before = pair.d.state()["preemptions"]
    prompts = {pair.key(): prompt(90 + i, 140 + i) for i in range(4)}
    # As above: D has room for four prompts of three blocks, but not for all that they go on to say.
    pair.d.call("hold", 13)
    for key, ids in prompts.items():
        pair.decode(key, ids, 40)
        pair.prefill(key, ids)
    pair.p.wait(*prompts)
    pair.check_received(prompts, 40)
    assert pair.d.state()["preemptions"] > before


def test_both_sides_are_preempted(pair: Pair) -> None:
    before = [node.state()["preemptions"] for node in (pair.p, pair.d)]
    prompts = {pair.key(): prompt(90 + i, 150 + i) for i in range(6)}
    for node in (pair.p, pair.d):
        node.call("hold", 13)
    for key, ids in prompts.items():
        pair.decode(key, ids, 40)
        pair.prefill(key, ids, 40)
    outputs = pair.p.wait(*prompts)
    expected = pair.fleet.expect(prompts, 40)
    assert {key: outputs[key]["tokens"][0] for key in prompts} == expected
    pair.check_all(prompts, 40)
    after = [node.state()["preemptions"] for node in (pair.p, pair.d)]
    assert all(b > a for a, b in zip(before, after, strict=True)), (before, after)


def test_case_c10_received_blocks_are_not_zeroed(pair: Pair) -> None:
    """vLLM may zero blocks when it allocates them, which is after their KV was asked for."""
    pair.serves()
    pair.d.call("zero", True)
    try:
        plain = pair.key()
        pair.d.add(plain, LONG, 8)
        pair.check(plain, LONG)
        assert len(pair.d.call("take_zeroed")) >= 22
        assert pair.d.call("forget")
        key = pair.key()
        pair.p.call("pause")
        pair.decode(key, LONG)
        pair.d.until(lambda _: pair.d.status(key) == WAITING)
        blocks = pair.d.call("blocks", key)
        assert len(blocks) == 22
        pair.prefill(key, LONG)
        pair.p.call("resume")
        pair.p.wait(key)
        pair.check_received({key: LONG})
        assert not set(pair.d.call("take_zeroed")) & set(blocks)
    finally:
        pair.d.call("zero", False)
