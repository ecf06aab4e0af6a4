"""One request through both connector halves over a fake engine, nothing going wrong."""

import copy
import pickle

import pytest
import torch
from harness import BLOCK, Pair, equal, tokens
from tiny import free_port


@pytest.mark.parametrize("held", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [3, 4, 5, 100])
def test_case_c1_only_what_decode_lacks_arrives(pair: Pair, held: int, chunk: int) -> None:
    prompt, source, target = tokens(14), [9, 3, 7, 5], [20, 23, 21, 22]
    before = {name: cache.clone() for name, cache in pair.d.caches.items()}
    d = pair.d_request(prompt, "k", (target,))
    assert pair.load(d, held * BLOCK) == 14 - held * BLOCK
    pair.d.step()
    p = pair.p_request(prompt, "k", (source,))
    while p.num_computed_tokens < 14:
        pair.p.step({p: min(chunk, 14 - p.num_computed_tokens)})
    delayed, params = pair.p.finish(p)
    assert delayed
    assert params["transfer_mode"] == "push"
    pair.d.step_until(lambda: pair.d.received == [d.request_id])
    assert pair.d.failed == []
    assert equal(pair, source[held:], target[held:])
    for name, cache in pair.d.caches.items():
        for block in [*range(20), *target[:held], *range(24, 64)]:
            assert torch.equal(cache[block], before[name][block])
    pair.p.step()
    assert pair.p.sent == [p.request_id]
    units = [len(call[1][0]) for call in pair.p.engine.called("advance")]
    assert sum(units) == 4


def test_response_has_the_fields_of_the_upstream_connector(pair: Pair) -> None:
    p = pair.p_request(tokens(5), "k", ([1, 2],))
    pair.p.step({p: 5})
    _, params = pair.p.finish(p)
    assert {name: params[name] for name in params if name != "remote_block_ids"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-kv_producer",
        "remote_request_id": p.request_id,
        "remote_host": "127.0.0.1",
        "remote_port": pair.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 5,
        "transfer_mode": "push",
        "transfer_id": "k",
    }


def test_windowed_groups_wait_for_the_last_chunk_and_skip_holes() -> None:
    pair = Pair(free_port(), windowed=True)
    try:
        prompt = tokens(12)
        d = pair.d_request(prompt, "k", ([20, 21, 22], [0, 31, 32]))
        pair.load(d)
        p = pair.p_request(prompt, "k", ([1, 2, 3], [11, 12, 13]))
        meta = pair.p.step({p: 8})
        assert meta.advances[0].blocks == ([1, 2], [])
        p.blocks = ([1, 2, 3], [0, 12, 13])
        meta = pair.p.step({p: 4})
        assert meta.advances[0].blocks == ([3], [-1, 12, 13])
        pair.d.step_until(lambda: pair.d.received == [d.request_id])
        assert not pair.d.failed
        assert equal(pair, [12, 13], [31, 32], ("layers.2",))
    finally:
        pair.close()


def test_metadata_is_picklable_and_its_ids_are_copies(pair: Pair) -> None:
    p = pair.p_request(tokens(8), "k", ([1, 2],))
    meta = pair.p.step({p: 8})
    p.blocks[0].extend([3, 4])
    assert meta.advances[0].blocks == ([1, 2],)
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_params_are_never_written_to(pair: Pair) -> None:
    prompt = tokens(8)
    p = pair.p_request(prompt, "k", ([1, 2],))
    d = pair.d_request(prompt, "k", ([20, 21],))
    before = copy.deepcopy((p.kv_transfer_params, d.kv_transfer_params))
    pair.load(d)
    pair.p.step({p: 8})
    pair.p.finish(p)
    pair.d.step_until(lambda: bool(pair.d.received))
    pair.d.finish(d)
    assert (p.kv_transfer_params, d.kv_transfer_params) == before
