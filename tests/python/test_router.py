"""The router's two legs, against fake engines that are real HTTP servers."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_router_fakes import DEADLINE_S, Call, Cluster, Fake, Held, cluster

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def one() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def hold(held: Held) -> Any:
    async def script(fake: Fake, call: Call) -> Any:
        await held.wait()
        return fake.good(call)

    return script


async def refuse(fake: Fake, call: Call) -> Any:
    return await fake.refuse(call)


def streaming(*steps: "str | Held") -> Any:
    async def script(fake: Fake, call: Call) -> Any:
        return fake.stream(call, *steps)

    return script


def test_both_legs_run_at_once_and_share_their_ids(one: Cluster) -> None:
    p_held, d_held = Held(), Held()
    one.prefill[0].script, one.decode[0].script = hold(p_held), hold(d_held)
    request = one.post_in_background()
    p, d = one.prefill[0].call(), one.decode[0].call()  # both are there, neither has answered
    p_held.release()
    d_held.release()
    answer = request.result()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "from d0"
    assert p.headers["x-request-id"] == d.headers["x-request-id"] == answer.headers["x-request-id"]
    assert p.params["transfer_id"] == d.params["transfer_id"]


def test_leg_bodies(one: Cluster) -> None:
    body = {
        "model": "m",
        "prompt": ["one", "two"],
        "n": 3,
        "max_tokens": 7,
        "min_tokens": 2,
        "best_of": 3,
        "logprobs": 1,
        "seed": 5,
        "kv_transfer_params": {"do_remote_prefill": "the client has no say in this"},
    }
    answer = one.post(body)
    p, d = one.prefill[0].call().body, one.decode[0].call().body
    transfer_id = p["kv_transfer_params"]["transfer_id"]
    assert p == {
        "model": "m",
        "prompt": ["one", "two"],
        "n": 1,
        "max_tokens": 1,
        "seed": 5,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_id": transfer_id,
        },
    }
    params = d.pop("kv_transfer_params")
    body.pop("kv_transfer_params")
    assert d == body
    assert params.pop("remote_request_id")
    assert params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "engine-p0",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "transfer_id": transfer_id,
    }
    assert len(answer.json()["choices"]) == 3


def test_chat_limits_prefill_by_both_names(one: Cluster) -> None:
    body = {"model": "m", "messages": [], "max_completion_tokens": 9, "stream_options": None}
    one.post(body, "/v1/chat/completions")
    p = one.prefill[0].call()
    assert (p.path, p.body["max_tokens"], p.body["max_completion_tokens"]) == ("/v1/chat/completions", 1, 1)
    assert "max_completion_tokens" not in one_completion(one)
    assert one.decode[0].call(0).body["max_completion_tokens"] == 9


def one_completion(made: Cluster) -> dict[str, Any]:
    made.post()
    return made.prefill[0].call(1).body


def test_each_request_gets_its_own_transfer_id_and_keeps_the_callers_request_id(one: Cluster) -> None:
    for _ in range(2):
        answer = one.post(headers={"x-request-id": "mine-1", "authorization": "Bearer k"})
        assert answer.headers["x-request-id"] == "mine-1"
    first, second = one.decode[0].call(0), one.decode[0].call(1)
    assert first.headers["authorization"] == "Bearer k"
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine-1"
    assert first.params["transfer_id"] != second.params["transfer_id"]
    assert first.params["remote_request_id"] != second.params["remote_request_id"]


def test_an_odd_request_id_is_replaced(one: Cluster) -> None:
    answer = one.post(headers={"x-request-id": "a b\tc"})
    assert answer.headers["x-request-id"] == one.prefill[0].call().headers["x-request-id"] != "a b\tc"


def test_streaming_passes_through_as_it_comes(one: Cluster) -> None:
    held = Held()
    first, second = 'data: {"n": 1}\n\n', 'data: {"n": 2}\n\ndata: [DONE]\n\n'
    one.decode[0].script = streaming(first, held, second)
    body = {"model": "m", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", one.url + "/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = answer.iter_raw()
        got = next(chunks).decode()
        assert got == first  # the second is still held back
        held.release()
        assert got + "".join(chunk.decode() for chunk in chunks) == first + second
    assert "stream_options" not in one.prefill[0].call().body
    assert one.decode[0].call().body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_failing_leg_cancels_the_other(one: Cluster, failing: str) -> None:
    held = Held()
    bad, other = one.prefill[0], one.decode[0]
    if failing == "decode":
        bad, other = other, bad
    other.script = hold(held)

    async def fail_once_the_other_runs(fake: Fake, call: Call) -> Any:
        assert await asyncio.to_thread(held.reached.wait, DEADLINE_S)
        return await fake.refuse(call, 500)

    bad.script = fail_once_the_other_runs
    answer = one.post()
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": f"{bad.name} says no",
        "type": "Oops",
        "param": None,
        "code": 500,
    }
    assert other.call().cancelled.wait(DEADLINE_S)
    held.release()
    assert one.metric("kvpush_router_leg_failures_total") == 1
    assert one.metric('kvpush_router_requests_total{outcome="failed"}') == 1
    assert one.metric("kvpush_router_backend_outstanding") == 0


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_client_error_is_passed_on_and_not_retried(failing: str) -> None:
    with cluster(2, 2) as made:
        held = Held()

        async def bad_request(fake: Fake, call: Call) -> Any:
            return await fake.refuse(call, 400)

        for fake in made.prefill + made.decode:
            fake.script = bad_request if fake.name.startswith(failing[0]) else hold(held)
        answer = made.post()
        held.release()
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "Oops"
        assert sum(len(f.calls) for f in (made.prefill if failing == "prefill" else made.decode)) == 1


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_failed_attempt_is_repeated_once_elsewhere_under_a_new_transfer_id(failing: str) -> None:
    with cluster(2, 2) as made:
        group = made.prefill if failing == "prefill" else made.decode
        seen: list[str] = []

        async def first_one_fails(fake: Fake, call: Call) -> Any:
            seen.append(fake.name)
            return await fake.refuse(call) if len(seen) == 1 else fake.good(call)

        held = Held()
        for fake in made.prefill + made.decode:
            fake.script = first_one_fails if fake in group else None
        if failing == "prefill":  # else D might have answered before P failed
            for fake in made.decode:
                fake.script = hold(held)
            request = made.post_in_background()
            group[1].call() if seen[:1] != ["p1"] else group[0].call()
            held.release()
            answer = request.result()
        else:
            answer = made.post()
        assert answer.status_code == 200
        assert sorted(seen) == sorted(fake.name for fake in group)
        ids = {call.params["transfer_id"] for fake in group for call in fake.calls}
        assert len(ids) == 2
        assert made.metric("kvpush_router_retries_total") == 1


def test_no_third_attempt() -> None:
    with cluster(1, 3) as made:
        for fake in made.decode:
            fake.script = refuse
        assert made.post().status_code == 500
        assert sum(len(fake.calls) for fake in made.decode) == 2


def test_an_error_as_first_event_of_a_stream_is_a_failed_leg(one: Cluster) -> None:
    event = {"error": {"message": "kv load failed", "type": "InternalServerError", "code": 500}}
    one.decode[0].script = streaming(f"data: {json.dumps(event)}\n\n", "data: [DONE]\n\n")
    answer = one.post({"model": "m", "prompt": "x", "stream": True})
    assert (answer.status_code, answer.json()) == (500, event)


def test_a_failing_prefill_does_not_matter_once_decode_has_answered(one: Cluster) -> None:
    p_held, d_held = Held(), Held()

    async def fail_late(fake: Fake, call: Call) -> Any:
        await p_held.wait()
        return await fake.refuse(call)

    one.prefill[0].script = fail_late
    one.decode[0].script = streaming("data: 1\n\n", d_held, "data: 2\n\n")
    body = {"model": "m", "prompt": "x", "stream": True}
    with httpx.stream("POST", one.url + "/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"data: 1\n\n"
        p_held.release()
        while one.metric('kvpush_router_backend_outstanding{role="prefill"'):
            pass
        d_held.release()
        assert b"".join(chunks) == b"data: 2\n\n"
    while not one.metric("kvpush_router_leg_failures_total"):
        pass


def test_a_stream_that_breaks_off_ends_with_an_error_event(one: Cluster) -> None:
    async def cut(fake: Fake, call: Call) -> Any:
        from starlette.responses import StreamingResponse

        async def events() -> Any:
            yield b"data: 1\n\n"
            raise RuntimeError("the engine died")

        return StreamingResponse(events(), media_type="text/event-stream")

    one.decode[0].script = cut
    answer = one.post({"model": "m", "prompt": "x", "stream": True})
    first, error, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502
    assert one.metric('kvpush_router_requests_total{outcome="broken_stream"}') == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_both_legs(one: Cluster, streamed: bool) -> None:
    p_held, d_held = Held(), Held()
    one.prefill[0].script = hold(p_held)
    one.decode[0].script = streaming("data: 1\n\n", d_held) if streamed else hold(d_held)
    body = json.dumps({"model": "m", "prompt": "x", "stream": streamed}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", one.port), DEADLINE_S) as client:
        client.sendall(head.encode() + body)
        p, d = one.prefill[0].call(), one.decode[0].call()
        assert d_held.reached.wait(DEADLINE_S)
        assert p_held.reached.wait(DEADLINE_S)
    assert p.cancelled.wait(DEADLINE_S)
    assert d.cancelled.wait(DEADLINE_S)
    p_held.release()
    d_held.release()
    while one.metric('kvpush_router_requests_total{outcome="client_gone"}') != 1:
        pass
    assert one.metric("kvpush_router_backend_outstanding") == 0


def test_identity_is_learned_from_the_first_answer() -> None:
    with cluster(learn=True) as made:
        made.post()
        made.post()
        for index in (0, 1):
            params = made.decode[0].call(index).params
            assert params["remote_engine_id"] == "engine-p0"
            assert (params["remote_host"], params["remote_port"]) == ("10.0.0.9", 5601)
            assert (params["tp_size"], params["pp_size"]) == (2, 1)


def test_identity_that_cannot_be_learned_is_an_error() -> None:
    async def ordinary(fake: Fake, call: Call) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"choices": [], "kv_transfer_params": None})

    with cluster(learn=True) as made:
        made.prefill[0].script = ordinary
        answer = made.post()
        assert answer.status_code == 502
        assert "kv_transfer_params" in answer.json()["error"]["message"]
        assert not made.decode[0].calls


def test_trace_file_has_one_line_per_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with cluster(trace_file=path) as made:
        made.post()
        made.decode[0].script = refuse
        made.post()
        key = made.decode[0].call(0).params["transfer_id"]
    good, bad = (json.loads(line) for line in path.read_text().splitlines())
    assert (good["status"], good["key"], good["attempts"]) == ("ok", key, 1)
    assert good["first_us"] <= good["total_us"]
    assert bad["status"] == "failed"
    assert bad["first_us"] is None
