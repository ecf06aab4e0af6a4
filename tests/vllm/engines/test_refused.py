"""Engines that must not talk to each other: the request fails closed, with a reason, by the policy."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from nodes import Node
from pairs import Pair
from tiny import free_port, prompt

SECRET = "correct horse battery staple"
OTHER = "another horse battery staple"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, pair: Pair, role: str, **how: object) -> Node:
    node = pair.start(role, **how)

    def end() -> None:
        node.finish()
        node.close()

    stack.callback(end)
    return node


def check_refused(pair: Pair, d: Node, port: int, policy: str, *words: str) -> None:
    key, ids = pair.key(), prompt(100, 5)
    d.call("policy", policy)
    d.add(key, ids, 8, pair.d_leg(key, port))
    pair.check_failed(policy, key, ids, d)
    (record,) = d.trace(key)
    assert record["status"] == "handshake_failed"
    assert record["bytes"] == 0
    for word in words:
        assert word in record["detail"], record["detail"]
    d.settle()


def test_case_c9_engines_with_different_block_sizes(pair: Pair, stack: ExitStack) -> None:
    d = start(stack, pair, "kv_consumer", block_size=64, num_gpu_blocks_override=128).ready()
    for policy in ("recompute", "fail"):
        check_refused(pair, d, pair.port, policy, "block_size", "32", "64")
    pair.serves()


def test_engines_with_a_shared_secret(pair: Pair, stack: ExitStack) -> None:
    port = free_port()
    p, d, stranger = (
        start(stack, pair, role, port=port, env={"KVPUSH_SECRET": secret})
        for role, secret in (("kv_producer", SECRET), ("kv_consumer", SECRET), ("kv_consumer", OTHER))
    )
    for node in (p, d, stranger):
        node.ready()

    def serves() -> None:
        key, ids = pair.key(), prompt(200, next(pair.fleet.numbers))
        p.add(key, ids, 1, pair.p_leg(key))
        d.add(key, ids, 8, pair.d_leg(key, port))
        p.wait(key)
        pair.check(key, ids, d=d)
        assert [record["kind"] for record in d.trace(key)] == ["received"]

    serves()
    for policy in ("recompute", "fail"):
        # Another secret; none where one is needed; one where none is known.
        check_refused(pair, stranger, port, policy, "secret")
        check_refused(pair, pair.d, port, policy, "secret")
        check_refused(pair, d, pair.port, policy, "secret")
    for node in (p, d, stranger, pair.d):
        assert SECRET not in node.log.read_text()
        assert OTHER not in node.log.read_text()
    serves()
    pair.serves()
    p.settle()
