"""Parameters that cannot be used: that request goes without, the engine lives."""

from typing import Any

import pytest
from harness import Pair, Request, connect, tokens
from tiny import free_port

BAD_DECODE: list[dict[str, Any]] = [
    *({name: None} for name in ("remote_engine_id", "remote_host", "remote_port", "tp_size")),
    {"transfer_id": None, "remote_request_id": None},
    {"transfer_id": 7},
    {"transfer_id": ""},
    {"transfer_id": "x" * 5000},
    {"remote_request_id": ["a"], "transfer_id": None},
    {"remote_host": 5},
    {"remote_port": "5600"},
    {"remote_port": True},
    {"remote_port": 0},
    {"remote_port": 65536},
    {"remote_port": 5600.0},
    {"tp_size": 2},
    {"tp_size": "1"},
    {"pp_size": 2},
    {"pp_size": {}},
    {"remote_engine_id": {}},
]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("bad", BAD_DECODE, ids=str)
def test_case_b1_bad_decode_params_fail_that_request_only(bad: dict[str, Any], policy: str) -> None:
    pair = Pair(free_port(), policy=policy)
    try:
        d = Request(tokens(8), pair.d_params(transfer_id="k") | bad, blocks=([20, 21],))
        pair.d.scheduler.on_new_request(d)
        promised = pair.load(d)
        pair.d.step()
        if policy == "fail":
            assert promised == 8
            assert (pair.d.received, pair.d.failed) == ([d.request_id], [d.request_id])
        else:
            assert promised == 0
            assert pair.d.received == []
        assert pair.d.finish(d) == (False, None)
        assert pair.d.scheduler.stats.data["skipped"] == {"bad_params": 1}
        good = pair.d_request(tokens(8), "good", ([22, 23],))
        p = pair.p_request(tokens(8), "good", ([1, 2],))
        pair.load(good)
        pair.p.step({p: 8})
        pair.d.step_until(lambda: good.request_id in pair.d.received)
        assert good.request_id not in pair.d.failed
    finally:
        pair.close()


@pytest.mark.parametrize(
    "params", [[1], "text", 5, {"do_remote_prefill": "yes"}, {"do_remote_prefill": 1}], ids=str
)
def test_case_b1_params_of_another_type_are_no_transfer(pair: Pair, params: Any) -> None:
    request = Request(tokens(8), params, blocks=([1, 2],))
    pair.d.scheduler.on_new_request(request)
    assert pair.d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert pair.d.finish(request) == (False, None)
    assert pair.d.scheduler.stats.data["skipped"] == {"bad_params": 1}


def test_roles_that_do_not_match_are_no_transfer(pair: Pair) -> None:
    d = Request(tokens(8), pair.p_params(transfer_id="k"), blocks=([1, 2],))
    pair.d.scheduler.on_new_request(d)
    p = Request(tokens(8), pair.d_params(transfer_id="k"), blocks=([1, 2],))
    pair.p.scheduler.on_new_request(p)
    assert pair.p.scheduler.get_num_new_matched_tokens(p, 0) == (0, False)
    for instance, request in ((pair.d, d), (pair.p, p)):
        instance.step({request: 8})
        assert instance.finish(request) == (False, None)
        assert instance.scheduler.stats.data["skipped"] == {"wrong_role": 1}


def test_prompt_embeddings_are_refused_and_the_other_side_hears_of_it(pair: Pair) -> None:
    connect(pair)
    p = Request(None, pair.p_params(transfer_id="k"), prompt_embeds=[0.0] * 8, blocks=([1, 2],))
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.load(d)
    pair.d.step()
    pair.p.scheduler.on_new_request(p)
    pair.p.step({p: 8})
    assert pair.p.finish(p) == (False, None)
    pair.d.step()
    assert pair.d.failed == [d.request_id]
