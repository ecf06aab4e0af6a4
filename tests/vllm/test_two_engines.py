"""Two real vLLM engines, two processes, real kvpush: the tokens are those of one engine alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_connector import free_port
from tiny import BLOCK_SIZE, make_model, prompt
from two_engines import Process

pytest.importorskip("kvpush._core", reason="the native module is not built")

CHUNK = 128
pytestmark = pytest.mark.slow


class Trio:
    """Prefill, decode, and one engine alone to compare with."""

    def __init__(self, folder: Path, transport: str) -> None:
        model = make_model(folder / "model")
        self.port = free_port()
        self.p, self.d, self.alone = (
            Process(role, model, self.port, transport, CHUNK, folder / f"{role}.log")
            for role in ("kv_producer", "kv_consumer", "alone")
        )
        for process in (self.p, self.d, self.alone):
            assert process.receive() == {"ready": True}
        self.num_traced = 0

    def params(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key},
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": "engine-kv_producer",
                "remote_host": "127.0.0.1",
                "remote_port": self.port,
                "tp_size": 1,
                "pp_size": 1,
                "remote_request_id": key,
                "transfer_id": key,
            },
        )

    def check(self, prompts: dict[str, list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        """Run all prompts on both sides at once; returns D's records of the transfers."""
        legs = {name: self.params(name) for name in prompts}
        self.d.send([[name, ids, max_tokens, legs[name][1]] for name, ids in prompts.items()])
        self.p.send([[name, ids, 1, legs[name][0]] for name, ids in prompts.items()])
        self.alone.send([[name, ids, max_tokens, None] for name, ids in prompts.items()])
        prefill, decode, alone = self.p.receive(), self.d.receive(), self.alone.receive()
        for name in prompts:
            assert decode[name]["tokens"] == alone[name]["tokens"], name
            assert decode[name]["reason"] == "length"
            assert prefill[name]["tokens"] == alone[name]["tokens"][:1]
            assert prefill[name]["params"]["transfer_mode"] == "push"
        self.num_traced += len(prompts)
        records = self.d.trace(self.num_traced)
        assert len(records) == self.num_traced
        recent = records[-len(prompts) :]
        for record in recent:
            assert record["kind"] == "received", record
            assert record["bytes"] == record["bytes_expected"]
        return recent

    def settle(self) -> None:
        """No block stays in use on either side."""
        for process in (self.p, self.d):
            process.send([])
            assert process.receive()["used_blocks"] == 0

    def close(self) -> None:
        for process in (self.p, self.d, self.alone):
            process.close()


@pytest.fixture(scope="module", params=["shm", pytest.param("nixl", marks=pytest.mark.nixl)])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    import kvpush

    reason = kvpush.transports().get(request.param, "unknown")
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    trio = Trio(tmp_path_factory.mktemp("engines"), request.param)
    yield trio
    trio.close()


def units(record: dict[str, Any]) -> int:
    """Blocks that a transfer moved (the model has 3 planes)."""
    return int(record["per_block_descriptors"]) // 3


def test_a_prompt_within_one_chunk(trio: Trio) -> None:
    for length in (1, 20, BLOCK_SIZE, 100):
        (record,) = trio.check({f"short{length}": prompt(length, length)})
        assert units(record) == -(-length // BLOCK_SIZE)
    trio.settle()


def test_a_prompt_of_several_chunks(trio: Trio) -> None:
    (record,) = trio.check({"long": prompt(700, 1)}, max_tokens=16)
    assert units(record) == 22
    trio.settle()


def test_sixteen_at_once(trio: Trio) -> None:
    trio.check({f"many{i}": prompt(15 + 23 * i, 100 + i) for i in range(16)})
    trio.settle()


def test_a_prefix_that_decode_holds_is_not_sent_again(trio: Trio) -> None:
    ids = prompt(300, 50)
    (first,) = trio.check({"first": ids})
    (again,) = trio.check({"again": ids})
    (more,) = trio.check({"more": ids + prompt(100, 51)})
    assert [units(record) for record in (first, again, more)] == [10, 1, 4]
    trio.settle()
