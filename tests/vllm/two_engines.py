"""One engine of a pair as a process: ``python two_engines.py ROLE MODEL PORT TRANSPORT CHUNK``.

Reads one JSON list per line from stdin, ``[[id, token ids, max tokens, transfer params or null], ...]``,
runs these requests and answers with one JSON object ``{id: {"tokens", "params", "reason"}}``. The end of
stdin ends it. An empty list makes it step until nothing is open. ROLE is "alone", "kv_producer" or
"kv_consumer".
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny


def main(role: str, model: str, port: str, transport: str, chunk: str) -> None:
    tiny.set_environment()
    # What vLLM prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    transfer = None
    if role != "alone":
        import kvpush.vllm

        kvpush.vllm.register()
        transfer = {
            "kv_connector": "KVPushConnector",
            "kv_role": role,
            "engine_id": f"engine-{role}",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "transport": transport,
                "side_channel_host": "127.0.0.1",
                "side_channel_port": int(port),
            },
        }
    engine = tiny.TinyEngine(model, transfer, max_tokens_per_step=int(chunk))
    lines: list[Any] = []
    arrived = threading.Event()
    reader = threading.Thread(target=_read, args=(lines, arrived), daemon=True)
    reader.start()
    print(json.dumps({"ready": True}), file=answers)
    while True:
        # An engine that holds pushes keeps stepping while it waits for orders, as a server does.
        while not arrived.is_set():
            if engine.scheduler.has_requests():
                engine.engine.step()
            else:
                arrived.wait(0.05)
        arrived.clear()
        if lines[0] is None:
            break
        orders = lines.pop(0)
        for req_id, ids, max_tokens, params in orders:
            engine.add(req_id, ids, max_tokens, params)
        outputs = engine.run()
        if not orders:
            engine.idle_steps(1_000_000)
        answer = {
            name: {
                "tokens": list(out.outputs[0].token_ids),
                "params": out.kv_transfer_params,
                "reason": out.outputs[0].finish_reason,
            }
            for name, out in outputs.items()
        }
        print(json.dumps(answer | ({} if orders else {"used_blocks": engine.used_blocks})), file=answers)
    engine.close()


def _read(lines: list[Any], arrived: threading.Event) -> None:
    for line in sys.stdin:
        lines.append(json.loads(line))
        arrived.set()
    lines.append(None)
    arrived.set()


class Process:
    """The driver's end of one engine process."""

    def __init__(self, role: str, model: str, port: int, transport: str, chunk: int, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, role, model, str(port), transport, str(chunk)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"KVPUSH_TRACE_FILE": str(log.with_suffix(".trace"))},
            )

    def send(self, orders: list[Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(orders) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(30)
            raise AssertionError(f"the engine died with {code}:\n{self.log.read_text()[-4000:]}")
        return dict(json.loads(line))

    def trace(self, count: int, deadline_s: float = 30.0) -> list[dict[str, Any]]:
        """The transfers recorded so far, once there are ``count``."""
        path = self.log.with_suffix(".trace")
        deadline = time.monotonic() + deadline_s
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= count or time.monotonic() > deadline:
                return [json.loads(line) for line in lines]
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
