"""Transport "auto": chosen for each session by what both sides have."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from engines import DEADLINE_S, DIGEST, arrays, cache, wait_for

import kvpush


def engine(transport: str = "auto", **settings: Any) -> tuple[kvpush.Engine, list[np.ndarray]]:
    planes = arrays(seed=len(transport))
    return kvpush.Engine(cache([planes]), kvpush.Config.from_env(transport=transport, **settings)), planes


def need(name: str) -> None:
    if why := kvpush.transports()[name]:
        pytest.skip(why)


def hello_of_a_process_in_its_own_network_namespace() -> bytes:
    code = (
        "import kvpush, numpy as np\n"
        "plane = kvpush.Plane.from_array(np.zeros((4, 1, 4, 8), np.float32))\n"
        "with kvpush.Engine(kvpush.Cache([kvpush.Group(4, [plane])]), kvpush.Config(transport='shm')) as p:\n"
        "    print(p.hello().hex())\n"
    )
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unshare -n is not allowed here")
    argv = ["unshare", "-n", sys.executable, "-c", code]
    return bytes.fromhex(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def hello_elsewhere(p: kvpush.Engine) -> bytes:
    """P's hello as an engine on another host would have said it: same form, other host."""
    hello = bytearray(p.hello())
    at = re.search(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/net:", bytes(hello))
    assert at is not None
    hello[at.start()] = ord("0") if hello[at.start()] != ord("0") else ord("1")
    return bytes(hello[:-8]) + fnv1a(bytes(hello[:-8])).to_bytes(8, "little")


def fnv1a(content: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in content:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def move(p: kvpush.Engine, d: kvpush.Engine, peer: str, key: str = "k") -> None:
    push = p.push(key, DIGEST)
    push.advance([[1]])
    push.finish()
    receive = d.receive(peer, key, digest=DIGEST, blocks=[[2]])
    assert wait_for(d, receive.handle).kind == "received"


def test_on_one_host_it_is_shared_memory_and_nothing_else_is_opened() -> None:
    (p, source), (d, target) = engine(), engine()
    with p, d:
        assert p.transport == d.transport == "auto"
        peer = d.establish(p.answer(d.offer(p.hello())))
        assert d.link(peer, DEADLINE_S) == ("shm", 0.0)
        assert p.link(peer) == ("shm", 0.0)
        move(p, d, peer)
        assert all(np.array_equal(a[1], b[2]) for a, b in zip(source, target, strict=True))


def test_without_a_hello_the_first_transport_is_offered() -> None:
    (p, _), (d, _) = engine(), engine()
    with p, d:
        peer = d.establish(p.answer(d.offer()))
        assert d.link(peer) == ("shm", 0.0)
        with pytest.raises(kvpush.PeerLost):
            d.link("0" * 32)


@pytest.mark.nixl
def test_on_two_hosts_it_is_a_network_transport_and_both_live_in_one_engine() -> None:
    (p, source), (d, target) = engine(), engine()
    paths = [name for name, _, _ in kvpush.paths(d.config) if name != "shm"]
    if not paths:
        pytest.skip("neither libfabric nor NIXL is here")
    with p, d:
        near = d.establish(p.answer(d.offer(p.hello())))
        far = d.establish(p.answer(d.offer(hello_elsewhere(p))))
        transport, rate = d.link(far, DEADLINE_S)
        assert transport == paths[0]
        assert rate > 0
        assert p.link(far) == (transport, rate)
        move(p, d, far, "far")
        move(p, d, near, "near")
        assert all(np.array_equal(a[1], b[2]) for a, b in zip(source, target, strict=True))
        d.disconnect(far)
        move(p, d, near, "again")


@pytest.mark.nixl
def test_a_slow_transport_gives_way_to_the_next_and_then_the_faster_is_kept() -> None:
    (p, _), (d, _) = engine(min_link_gb_per_s=1e6), engine(min_link_gb_per_s=1e6)
    paths = [name for name, _, _ in kvpush.paths(d.config) if name != "shm"]
    if len(paths) < 2:
        pytest.skip(f"two network transports are needed, here: {paths}")
    with p, d:
        hello = hello_elsewhere(p)
        seen = []
        for _ in range(3):
            peer = d.establish(p.answer(d.offer(hello)))
            seen.append(d.link(peer, DEADLINE_S))
            d.disconnect(peer)
        assert [name for name, _ in seen[:2]] == paths
        assert seen[2][0] == max(seen[:2], key=lambda link: link[1])[0]


@pytest.mark.parametrize("name", [pytest.param("nixl", marks=pytest.mark.nixl), "fabric"])
def test_a_named_transport_is_the_only_one(name: str) -> None:
    need(name)
    (p, _), (d, _) = engine(), engine(name)
    with p, d:
        # On one host, yet over what D named.
        peer = d.establish(p.answer(d.offer(p.hello())))
        assert d.link(peer, DEADLINE_S)[0] == name
        move(p, d, peer)
        # An older D, which asks for no hello.
        peer = d.establish(p.answer(d.offer()))
        assert d.link(peer)[0] == name
    (p, _), (d, _) = engine(name), engine()
    with p, d:
        peer = d.establish(p.answer(d.offer(p.hello())))
        assert d.link(peer, DEADLINE_S)[0] == name
        with pytest.raises(kvpush.HandshakeError, match=f"transport: theirs shm, ours {name}"):
            p.answer(d.offer())


def test_what_cannot_be_met_is_refused_with_both_lists() -> None:
    need("fabric")
    (p, _), (d, _) = engine("shm"), engine("fabric")
    with p, d, pytest.raises(kvpush.HandshakeError, match=r"in common: theirs shm \(.*\), ours fabric \("):
        d.offer(p.hello())
    (p, _), (d, _) = engine("shm"), engine("shm")
    with p, d, pytest.raises(kvpush.HandshakeError, match=r"in common: theirs shm \(.*\), ours shm \("):
        d.offer(hello_elsewhere(p))


def test_a_transport_that_seemed_to_be_there_gives_way(tmp_path: Any, capfd: Any) -> None:
    need("fabric")
    broken = tmp_path / "libnixl_capi.so"
    broken.write_bytes(b"no library")
    # NIXL named at P: only that could be common, and D cannot open it.
    (p, _), (d, _) = engine(nixl_library=str(broken)), engine(nixl_library=str(broken))
    with p, d:
        peer = d.establish(p.answer(d.offer(hello_elsewhere(p))))
        assert d.link(peer, DEADLINE_S)[0] == "fabric"
        assert "nixl" in [name for name, _, _ in kvpush.paths(d.config)]


def test_engines_in_two_network_namespaces_do_not_try_shared_memory() -> None:
    hello = hello_of_a_process_in_its_own_network_namespace()
    (d, _) = engine("shm")
    with d, pytest.raises(kvpush.HandshakeError, match="no transport in common: theirs shm"):
        d.offer(hello)


def test_a_hello_is_checked_and_sealed() -> None:
    secret = "0123456789abcdef"
    (p, _), (d, _) = engine(secret=secret), engine(secret=secret)
    (stranger, _) = engine()
    with p, d, stranger:
        peer = d.establish(p.answer(d.offer(p.hello())))
        assert d.link(peer)[0] == "shm"
        with pytest.raises(kvpush.HandshakeError, match="the hello is not signed"):
            d.offer(stranger.hello())
        with pytest.raises(kvpush.HandshakeError, match="not a hello"):
            stranger.offer(b"x")
        with pytest.raises(kvpush.HandshakeError, match="belongs to another question"):
            d.offer(d.offer())
        for nonsense in (stranger.hello()[:-1], b"\0" + stranger.hello()[1:]):
            with pytest.raises(kvpush.HandshakeError):
                stranger.offer(nonsense)


def test_after_close_every_call_says_so() -> None:
    (p, _) = engine()
    hello = p.hello()
    p.close()
    for call in (p.hello, lambda: p.offer(hello), lambda: p.link("0" * 32)):
        with pytest.raises(kvpush.ClosedError):
            call()
