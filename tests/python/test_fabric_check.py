"""``bench/fabric_check.sh``: both roles on this host, over a provider that is here, with tiny sizes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpush
from kvpush.doctor import fabric

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "fabric_check.sh"
ARMS = "fi-writedata,kvpush-fabric"


def provider() -> str:
    pytest.importorskip("numpy")
    if why := kvpush.transports().get("fabric", "not in this build"):
        pytest.skip(why)
    found, reason = fabric.find()
    assert found is not None, reason
    names = [each.name for each in found.providers if each.usable]
    return next(name for name in ("tcp", "tcp;ofi_rxm", *names) if name in names)


@pytest.mark.timeout(600)
def test_both_roles(tmp_path: Path) -> None:
    port = "0"
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "PROVIDER": provider(),
        "OUT": str(tmp_path),
        "ROUNDS": "1",
        "SIZES": "--num-layers 2 --total-bytes 256KiB --cache-bytes 1MiB",
        "ARMS": ARMS,
        "LATENCY_ARMS": ARMS,
        "KVPUSH_SECRET": "of two hosts in a test",
    }
    server = subprocess.Popen(
        ["bash", str(SCRIPT), "server"],
        env={**env, "PORT": port},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        seen = []
        for line in server.stdout:
            seen.append(line)
            if line.startswith("kvpush bench peer: "):
                port = line.rsplit(":", 1)[1].strip()
                break
        else:
            pytest.fail("".join(seen))
        client = subprocess.run(
            ["bash", str(SCRIPT), "client", "127.0.0.1"],
            env={**env, "PORT": port},
            capture_output=True,
            text=True,
            check=False,
        )
        assert client.returncode == 0, client.stdout + client.stderr
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60) == 0
    for role in ("server", "client"):
        environment = json.loads((tmp_path / f"{role}-environment.json").read_text())
        assert {"limits", "rdma_devices", "interfaces", "fi_info", "settings", "warnings"} <= set(environment)
        assert environment["settings"]["KVPUSH_FABRIC_PROVIDER"] == env["PROVIDER"]
        assert "KVPUSH_SECRET" not in environment["settings"]
        assert json.loads((tmp_path / f"{role}-doctor.json").read_text())["fabric"]["providers"]
    for name, cases in (("transfer", 4), ("latency", 2)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()][1:]
        assert [row["arm"] for row in rows] == ["fi-writedata", "kvpush"] * cases
        assert {row["target"] for row in rows} == {env["PROVIDER"]}
    assert "fi-writedata fabric" in client.stdout


@pytest.mark.parametrize(
    ("args", "secret", "message"),
    [
        ((), "of two hosts in a test", "fabric_check.sh server"),
        (("client",), "of two hosts in a test", "fabric_check.sh server"),
        (("server",), "short", "KVPUSH_SECRET must be set"),
    ],
)
def test_what_is_missing_is_said(args: tuple[str, ...], secret: str, message: str) -> None:
    env = {**os.environ, "KVPUSH_SECRET": secret}
    done = subprocess.run(
        ["bash", str(SCRIPT), *args], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stdout


def warnings(**changes: Any) -> list[str]:
    spec = importlib.util.spec_from_file_location("fabric_environment", ROOT / "bench/fabric_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {
        "rdma_devices": [{"driver": "efa", "state": "4: ACTIVE"}],
        "limits": {"memlock": {"soft": "unlimited"}},
        "modules": ["efa"],
        "settings": {},
    }
    lines: list[str] = module.warnings({**found, **changes})
    return [line for line in lines if "/dev/infiniband" not in line]


def test_warnings_of_the_environment() -> None:
    assert warnings() == []
    assert "neither efa nor verbs" in warnings(rdma_devices=[])[0]
    assert "locked memory" in warnings(limits={"memlock": {"soft": 65536}})[0]
    assert "not ACTIVE" in warnings(rdma_devices=[{"driver": "efa", "state": "1: DOWN"}])[0]
    assert "turns RDMA off" in warnings(settings={"FI_EFA_USE_DEVICE_RDMA": "0"})[0]
    assert "rdma_ucm" in warnings(rdma_devices=[{"driver": "mlx5_core", "state": "4: ACTIVE"}])[0]
