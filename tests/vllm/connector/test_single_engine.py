"""One real vLLM engine, role kv_both, whose prompts come back to it through a fake transfer engine.

What is real: every hook, in vLLM's own order, and the KV that moves between the engine's own blocks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyEngine, free_port, make_model, prompt

from kvpush.testing import FakeEngine, FakeNetwork

CHUNK = 128


class Loop:
    """The engine, its fake transfer engine, and both legs' parameters."""

    def __init__(self, model: str, **options: Any) -> None:
        import kvpush.vllm
        from kvpush.vllm import layout

        kvpush.vllm.register()
        self.port = free_port()
        self.network = FakeNetwork()
        self.fakes: list[FakeEngine] = []

        def build(spec: Any, extra: Any) -> FakeEngine:
            self.fakes.append(FakeEngine(spec, self.network))
            return self.fakes[-1]

        patch = pytest.MonkeyPatch()
        patch.setattr(layout, "build_engine", build)
        try:
            self.engine = TinyEngine(
                model,
                {
                    "kv_connector": "KVPushConnector",
                    "kv_role": "kv_both",
                    "engine_id": "loop",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {
                        "side_channel_host": "127.0.0.1",
                        "side_channel_port": self.port,
                    },
                },
                max_tokens_per_step=CHUNK,
                **options,
            )
        finally:
            patch.undo()

    @property
    def fake(self) -> FakeEngine:
        return self.fakes[-1]

    def p(self, key: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}

    def d(self, key: str, **more: Any) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_engine_id": "loop",
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_request_id": key,
            "transfer_id": key,
            **more,
        }

    def settle(self) -> None:
        """Everything ended: no request, no block in use, nothing open in the connector."""
        self.engine.idle_steps()
        assert self.engine.used_blocks == 0
        assert self.fake.pushes == {}
        assert self.fake.receives == {}
        half = self.engine.scheduler.connector.scheduler_half
        assert not half._pushes
        assert not half._loads
        assert not half._delayed
        self.fake.calls.clear()

    def set_policy(self, policy: str) -> None:
        self.engine.scheduler.recompute_kv_load_failures = policy == "recompute"
        self.engine.scheduler.connector.scheduler_half._fail_policy = policy == "fail"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    # No prefix caching: nothing but the transfer can bring the second leg its KV.
    loop = Loop(make_model(Path(tmp_path_factory.mktemp("model"))), enable_prefix_caching=False)
    yield loop
    loop.engine.close()


def output(outputs: dict[str, Any], req_id: str) -> list[int]:
    return list(outputs[req_id].outputs[0].token_ids)


@pytest.mark.parametrize("length", [1, 10, 31, 32, 33, 100, 300, 500])
@pytest.mark.parametrize("decode_first", [False, True])
def test_same_tokens(loop: Loop, length: int, decode_first: bool) -> None:
    ids = prompt(length, length)
    expected = loop.engine.generate(ids)
    legs = [("p", 1, loop.p("k")), ("d", 8, loop.d("k"))]
    for name, max_tokens, params in reversed(legs) if decode_first else legs:
        loop.engine.add(name, ids, max_tokens, params)
    outputs = loop.engine.run()
    assert output(outputs, "d") == expected
    assert [event_key for event_key, _, first in loop.fake.called("receive") if first == [0]] == ["k"]
    assert loop.fake.called("cancel_receive") == []
    assert output(outputs, "p") == expected[:1]
    assert outputs["p"].kv_transfer_params["transfer_mode"] == "push"
    loop.settle()


def test_sixteen_at_once(loop: Loop) -> None:
    prompts = {str(i): prompt(20 + 17 * i, i) for i in range(8)}
    expected = {name: loop.engine.generate(ids) for name, ids in prompts.items()}
    for name, ids in prompts.items():
        loop.engine.add("d" + name, ids, 8, loop.d(name))
        loop.engine.add("p" + name, ids, 1, loop.p(name))
    outputs = loop.engine.run()
    for name in prompts:
        assert output(outputs, "d" + name) == expected[name]
    loop.settle()


def test_prefill_that_answers_first_and_sequential_params(loop: Loop) -> None:
    ids = prompt(100, 5)
    expected = loop.engine.generate(ids)
    loop.engine.add("p", ids, 1, loop.p("k"))
    params = dict(loop.engine.run()["p"].kv_transfer_params)
    loop.engine.add("d", ids, 8, params)
    outputs = loop.engine.run()
    assert output(outputs, "d") == expected
    assert [call[0] for call in loop.fake.called("receive")] == ["k"]
    loop.settle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["other prompt", "bad params", "no peer"])
def test_failures_follow_the_policy(loop: Loop, policy: str, fault: str) -> None:
    ids = prompt(100, 9)
    expected = loop.engine.generate(ids)
    loop.set_policy(policy)
    try:
        more: dict[str, Any] = {}
        if fault == "bad params":
            more = {"remote_host": None}
        elif fault == "no peer":
            more = {"remote_host": "no-such-host.invalid"}
        loop.engine.add("p", prompt(100, 10) if fault == "other prompt" else ids, 1, loop.p("k"))
        loop.engine.add("d", ids, 8, loop.d("k", **more))
        steps: dict[str, Any] = {}
        while "d" not in steps:
            steps |= loop.engine.step()
        if policy == "recompute":
            assert output(steps, "d") == expected
        else:
            assert steps["d"].outputs[0].finish_reason == "error"
        loop.fake.evict(10)
        loop.engine.run()
        loop.settle()
    finally:
        loop.set_policy("recompute")


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("who", ["p", "d"])
def test_abort_after_any_number_of_steps(loop: Loop, steps: int, who: str) -> None:
    ids = prompt(300, 3)
    loop.engine.add("d", ids, 8, loop.d("k"))
    loop.engine.add("p", ids, 1, loop.p("k"))
    for _ in range(steps):
        loop.engine.step()
    loop.engine.engine.abort_request([who])
    # An abort of the decode leg may come before its claim, then nobody claims the push.
    for _ in range(50):
        loop.engine.step()
    loop.fake.evict(10)
    loop.engine.run()
    loop.settle()
    assert loop.engine.generate(ids)


def test_many_aborts_leak_nothing(loop: Loop) -> None:
    ids = prompt(40, 4)
    for i in range(300):
        loop.engine.add(f"d{i}", ids, 4, loop.d(f"never{i}"))
        if i % 4:
            loop.engine.step()
        loop.engine.engine.abort_request([f"d{i}"])
    loop.engine.run()
    loop.network.engines[loop.fake.incarnation].pending.clear()
    loop.settle()


def test_preemption_of_prefill(loop: Loop) -> None:
    ids = prompt(400, 8)
    expected = loop.engine.generate(ids)
    loop.engine.add("d", ids, 8, loop.d("k"))
    loop.engine.add("p", ids, 4, loop.p("k"))
    done: dict[str, Any] = {}
    for step in range(20):
        done |= loop.engine.step()
        if step in (1, 3):
            running = [request for request in loop.engine.scheduler.running if request.request_id[0] == "p"]
            if running:
                loop.engine.scheduler.running.remove(running[0])
                loop.engine.scheduler._preempt_request(running[0], 0.0)
    done |= loop.engine.run()
    assert loop.fake.called("retract")
    assert output(done, "d") == expected
    assert output(done, "p") == expected[:4]
    loop.settle()


def test_more_than_one_completion(loop: Loop) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = prompt(70, 2)
    loop.engine.add("p", ids, 1, loop.p("k"))
    sampling = SamplingParams(
        n=3,
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=0.5,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": loop.d("k")},
    )
    loop.engine.engine.add_request("d", {"prompt_token_ids": ids}, sampling)
    outputs = loop.engine.run()
    assert len(outputs["d"].outputs) == 3
    assert len(loop.fake.called("receive")) == 1
    loop.settle()


def test_prompt_log_probabilities_are_computed_here(loop: Loop) -> None:
    from vllm import SamplingParams

    ids = prompt(70, 6)
    expected = loop.engine.generate(ids)
    loop.engine.add("p", ids, 1, loop.p("k"))
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1,
        extra_args={"kv_transfer_params": loop.d("k")},
    )
    loop.engine.engine.add_request("d", {"prompt_token_ids": ids}, sampling)
    assert output(loop.engine.run(), "d") == expected
    loop.settle()
