"""The demo's story: start everything, send the prompts, compare, count."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpush.demo.client import Completion, complete_all
from kvpush.demo.engines import (
    BLOCK_TOKENS,
    DTYPE,
    Deployment,
    Ports,
    start_engines,
    start_router,
    transport_in_use,
)
from kvpush.demo.expect import DecodeCache, kv_shape
from kvpush.demo.prompts import STAGES, Prompt
from kvpush.demo.servers import Servers
from kvpush.demo.trace import Line, moved, of_key, read_lines, wait_until

Progress = Callable[[str], None]

_START_S = 900.0
_TRACE_S = 10.0


@dataclass
class Row:
    """What came of one prompt. ``bytes_*`` are bytes of KV; ``None`` where nothing was recorded."""

    prompt: str
    prompt_tokens: int
    text: str
    reference: str
    equal: bool
    bytes_expected: int
    bytes_moved: int
    network_ops: int
    per_block_descriptors: int
    transfer_ms: float | None
    handover_ms: float | None
    transport: str
    status: str

    @property
    def good(self) -> bool:
        """Whether the text is right and exactly the expected KV was moved."""
        return self.equal and self.status == "ok" and self.bytes_moved == self.bytes_expected


def run(model: Path, transport: str, logs: Path, progress: Progress) -> list[Row]:
    """Run the whole demo and return one row per prompt, in order.

    Raises
    ------
    ServerError
        A server did not start or died.
    RequestError
        A completion was refused.
    ValueError
        The model's KV cannot be counted.
    """
    shape = kv_shape(model, DTYPE, BLOCK_TOKENS)
    with Servers() as servers:
        deployment = _start(servers, model, transport, logs, progress)
        answers: list[tuple[Prompt, Completion]] = []
        expected: list[int] = []
        cache = DecodeCache(BLOCK_TOKENS)
        for stage in STAGES:
            progress("sending: " + ", ".join(prompt.label for prompt in stage))
            completions = complete_all(deployment.router.url, stage)
            servers.check_alive()
            for completion in completions:
                missing = cache.num_blocks_missing(completion.prompt_token_ids)
                expected.append(missing * shape.block_bytes)
            for completion in completions:
                cache.add(completion.prompt_token_ids, completion.token_ids)
            answers += zip(stage, completions, strict=True)
        references = _references(deployment, progress)
        progress("reading the trace files")
        deadline = time.monotonic() + _TRACE_S
        used = transport_in_use(deployment.decode.log, transport)
        rows = [
            _row(deployment, used, *answer, reference, num_bytes, deadline)
            for answer, reference, num_bytes in zip(answers, references, expected, strict=True)
        ]
        servers.check_alive()
        progress("stopping the servers")
    return rows


def _start(servers: Servers, model: Path, transport: str, logs: Path, progress: Progress) -> Deployment:
    ports = Ports.choose()
    prefill, decode = start_engines(servers, model, transport, ports, logs)
    servers.wait_ready([prefill, decode], _START_S, progress)
    router = start_router(servers, ports, logs)
    servers.wait_ready([router], 60.0, progress)
    return Deployment(
        prefill=prefill,
        decode=decode,
        router=router,
        prefill_trace=logs / "prefill.trace.jsonl",
        decode_trace=logs / "decode.trace.jsonl",
        router_trace=logs / "router.trace.jsonl",
    )


def _references(deployment: Deployment, progress: Progress) -> list[Completion]:
    """Return what one engine alone answers.

    P is asked directly and without kv_transfer_params: it then serves the request wholly by itself, as
    any vLLM does. That comes last, and with a salt of its own: asked first, P would have all prompts in
    its prefix cache when the real requests come and would compute nothing; without the salt it would
    answer from the KV of the real requests instead of computing its own.
    """
    references: list[Completion] = []
    for stage in STAGES:
        for prompt in stage:
            progress(f"reference, one engine alone: {prompt.label}")
            references += complete_all(deployment.prefill.url, [prompt], salt="kvpush-demo-reference")
    return references


def _row(
    deployment: Deployment,
    transport: str,
    prompt: Prompt,
    completion: Completion,
    reference: Completion,
    bytes_expected: int,
    deadline: float,
) -> Row:
    routed = _router_line(deployment.router_trace, completion.request_id, deadline)
    key = str(routed.get("key", ""))
    result = moved(
        _lines(deployment.decode_trace, key, "receive", deadline),
        _lines(deployment.prefill_trace, key, "push", deadline),
    )
    prefill_us, first_us = routed.get("prefill_us"), routed.get("first_us")
    handover_ms = None
    if isinstance(prefill_us, int) and isinstance(first_us, int):
        handover_ms = (first_us - prefill_us) / 1000
    return Row(
        prompt=prompt.label,
        prompt_tokens=len(completion.prompt_token_ids),
        text=completion.text,
        reference=reference.text,
        equal=completion.token_ids == reference.token_ids and completion.text == reference.text,
        bytes_expected=bytes_expected,
        bytes_moved=result.bytes if result else 0,
        network_ops=result.network_ops if result else 0,
        per_block_descriptors=result.per_block_descriptors if result else 0,
        transfer_ms=result.transfer_us / 1000 if result and result.transfer_us is not None else None,
        handover_ms=handover_ms,
        transport=transport,
        status=result.status if result else "nothing recorded",
    )


def _lines(path: Path, transfer_id: str, side: str, deadline: float) -> list[Line]:
    if not transfer_id:
        return []
    wait_until(lambda: bool(of_key(read_lines(path), transfer_id, side)), deadline)
    return of_key(read_lines(path), transfer_id, side)


def _router_line(path: Path, request_id: str, deadline: float) -> Line:
    def find() -> Line | None:
        return next((line for line in read_lines(path) if line.get("request_id") == request_id), None)

    wait_until(lambda: find() is not None, deadline)
    return find() or {}
