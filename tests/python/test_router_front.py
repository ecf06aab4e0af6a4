"""The router's own answers: rotation of backends, and errors that no engine sees."""

import http.client
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_router_fakes import DEADLINE_S, Call, Fake, Held, cluster, serve

from kvpush.demo.servers import Servers, free_ports
from kvpush.router.config import KvIdentity, RouterLimits, parse_decode, parse_prefill

pytestmark = pytest.mark.timeout(120)


def test_health_and_rotation_follow_the_backends() -> None:
    with cluster(1, 2) as made:
        assert httpx.get(made.url + "/health").status_code == 200
        made.decode[0].healthy = False
        made.wait_for_state("decode", [False, True])
        for _ in range(3):
            assert made.post().json()["choices"][0]["text"] == "from d1"
        made.decode[1].healthy = False
        made.wait_for_state("decode", [False, False])
        assert httpx.get(made.url + "/health").status_code == 503
        answer = made.post()
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert "decode" in answer.json()["error"]["message"]
        made.decode[0].healthy = True
        made.wait_for_state("decode", [True, False])
        assert made.post().json()["choices"][0]["text"] == "from d0"


def test_a_backend_that_dies_is_replaced_at_once_and_taken_back_when_it_returns() -> None:
    # No health check comes to help: the refused connection itself takes the backend out.
    limits = RouterLimits(health_interval_s=3600.0)
    spare = Fake("spare")
    with serve(spare.app()) as port:
        spare.port = port
        with cluster(1, 1, limits=limits) as made:
            from kvpush.router.app import Router, build_app

            dying = Fake("dying")
            stop = serve(dying.app())
            dying.port = stop.__enter__()
            router = Router(
                [parse_prefill(f"{made.prefill[0].url},kv=h:1,id=e")],
                [parse_decode(dying.url), parse_decode(spare.url)],
                limits,
            )
            with serve(build_app(router)) as front:
                stop.__exit__(None, None, None)
                url = f"http://127.0.0.1:{front}"
                body = {"model": "m", "prompt": "x"}
                for _ in range(2):
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
                    assert answer.json()["choices"][0]["text"] == "from spare"
                states = {b["url"]: b["up"] for b in httpx.get(f"{url}/health").json()["decode"]}
                assert states == {dying.url: False, spare.url: True}


def test_a_backend_comes_back_after_a_restart() -> None:
    fake = Fake("d")
    with serve(fake.app()) as port:
        fake.port = port
        with cluster(1, 1) as made:
            from kvpush.router.app import Router, build_app

            limits = RouterLimits(health_interval_s=0.01, health_failures=1)
            down = Fake("late")
            with serve(down.app()) as late_port:
                pass  # the port is free again, nobody listens
            down.port = late_port
            router = Router(
                [parse_prefill(f"{made.prefill[0].url},kv=h:1,id=e")], [parse_decode(down.url)], limits
            )
            with serve(build_app(router)) as front:
                made.port = front
                assert made.post().status_code == 503
                with serve(down.app(), late_port):
                    made.wait_for_state("decode", [True])
                    assert made.post().json()["choices"][0]["text"] == "from late"
                made.wait_for_state("decode", [False])


def test_requests_go_to_the_least_busy_backend() -> None:
    with cluster(1, 2) as made:
        held = Held()

        async def wait(fake: Fake, call: Call) -> Any:
            await held.wait()
            return fake.good(call)

        for fake in made.decode:
            fake.script = wait
        pending = [made.post_in_background() for _ in range(4)]
        for fake in made.decode:
            fake.call(1)  # two each
        held.release()
        assert [request.result().status_code for request in pending] == [200] * 4
        assert [len(fake.calls) for fake in made.decode] == [2, 2]


def test_models_come_from_a_backend() -> None:
    with cluster() as made:
        assert httpx.get(made.url + "/v1/models").json()["data"] == [{"id": "d0"}]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"temperature": NaN}', "NaN is no JSON value"),
        (b'{"temperature": -1e999}', "-1e999 is too large a number"),
        (b'["a"]', "must be a JSON object"),
    ],
)
def test_bad_bodies_are_the_clients_error(content: bytes, part: str) -> None:
    with cluster() as made:
        answer = httpx.post(made.url + "/v1/completions", content=content, timeout=DEADLINE_S)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert part in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", 400)
        assert not made.prefill[0].calls


def test_a_lone_surrogate_reaches_the_engines() -> None:
    with cluster() as made:
        content = b'{"model": "m", "prompt": "\\ud800"}'
        answer = httpx.post(made.url + "/v1/completions", content=content, timeout=DEADLINE_S)
        assert answer.status_code == 200
        assert made.prefill[0].call().body["prompt"] == made.decode[0].call().body["prompt"] == "\ud800"


@pytest.mark.parametrize("declared", [True, False])
def test_oversized_bodies_are_refused(declared: bool) -> None:
    limits = RouterLimits(max_body_bytes=1000)
    with cluster(limits=limits) as made:
        content: Any = b"x" * 1001 if declared else (b"x" * 100 for _ in range(11))
        answer = httpx.post(made.url + "/v1/completions", content=content, timeout=DEADLINE_S)
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
        assert not made.prefill[0].calls


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
)
def test_unknown_routes_get_an_openai_error(method: str, path: str, status: int) -> None:
    with cluster() as made:
        answer = httpx.request(method, made.url + path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert path in answer.json()["error"]["message"]


def test_a_backend_that_answers_nonsense_is_an_openai_error() -> None:
    async def nonsense(fake: Fake, call: Call) -> Any:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("<html>bad gateway</html>", 502)

    with cluster() as made:
        made.decode[0].script = nonsense
        answer = made.post()
        assert answer.status_code == 502
        assert "bad gateway" in answer.json()["error"]["message"]


def test_metrics_are_prometheus_text() -> None:
    with cluster() as made:
        made.post()
        assert made.metric('kvpush_router_requests_total{outcome="ok"}') == 1
        assert made.metric("kvpush_router_backend_up") == 2
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=DEADLINE_S)
        connection.request("GET", "/metrics")
        kind = connection.getresponse().getheader("content-type")
        connection.close()
        assert kind is not None
        assert kind.startswith("text/plain; version=0.0.4")


def test_prefill_syntax() -> None:
    spec = parse_prefill("http://p:8100/v1,kv=[fd00::1]:5600,id=e-1,tp=2,pp=3")
    assert spec.url == "http://p:8100"
    assert spec.identity == KvIdentity("e-1", "fd00::1", 5600, 2, 3)
    assert parse_prefill("http://p:8100/").identity is None


@pytest.mark.parametrize(
    "text",
    [
        "p:8100",
        "http://",
        "http://p:99999",
        "http://p,kv=h:1",
        "http://p,id=e",
        "http://p,kv=h,id=e",
        "http://p,kv=h:0,id=e",
        "http://p,kv=h:1,id=e,tp=0",
        "http://p,kv=h:1,id=e,what=1",
        "http://p,kv=h:1,id=e,id=f",
    ],
)
def test_wrong_prefill_syntax_names_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="--prefill"):
        parse_prefill(text)


def test_wrong_decode_syntax() -> None:
    with pytest.raises(ValueError, match="takes a URL alone"):
        parse_decode("http://d,kv=h:1")


def test_the_command_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    with cluster() as made, Servers() as servers:
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "kvpush", "router", "--json", "--port", str(port)]
        argv += ["--prefill", f"{made.prefill[0].url},kv=127.0.0.1:1,id=e", "--decode", made.decode[0].url]
        argv += ["--trace-file", str(tmp_path / "trace")]
        server = servers.start("router", argv, {}, tmp_path / "log", f"http://127.0.0.1:{port}")
        servers.wait_ready([server], 60.0, lambda text: None)
        body = {"model": "m", "prompt": "x"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert answer.json()["choices"][0]["text"] == "from d0"
        printed = json.loads(server.last_lines()[0])
        assert printed["listen"] == server.url
    assert json.loads((tmp_path / "trace").read_text())["status"] == "ok"
    assert server.exit_code() is not None


def test_a_header_that_is_not_ascii_is_passed_on_as_it_is() -> None:
    with cluster(1, 1) as made:
        sent = "Bearer \xe9".encode("latin-1")
        assert made.post(headers={"authorization": sent}).status_code == 200
        assert made.decode[0].calls[0].headers["authorization"].encode("latin-1") == sent
