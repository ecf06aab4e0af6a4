"""The ``kvpush`` command itself, and ``kvpush doctor``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpush.cli import doctor as doctor_module
from kvpush.cli.main import app
from kvpush.doctor import fabric, host, selftest

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
        timeout=120,
    )


def test_help_imports_nothing_heavy() -> None:
    done = run_python(
        "import sys; from kvpush.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'httpx', 'starlette', 'uvicorn', 'numpy', 'torch', 'vllm', 'transformers', 'asyncio'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    assert "heavy: []" in done.stdout, done.stdout + done.stderr
    for command in ("doctor", "demo", "router"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["doctor", "demo", "router"])
def test_each_command_has_help_and_json(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.nixl
def test_a_process_that_has_opened_nixl_ends_well() -> None:
    # The wheel's libnl beside the system's, where libibverbs is installed: docs/gotchas.md.
    done = run_python("import kvpush; print(kvpush.transports()['nixl'])", UCX_MODULES="all")
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("kvpush ")


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpush", "--help"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0
    assert "doctor" in done.stdout


def test_router_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = runner.invoke(app, ["router", "--prefill", "http://p:1", "--decode", "http://d:1"])
    assert result.exit_code == 2
    assert "pip install 'kvpush[router]'" in result.output


def test_router_refuses_bad_backends() -> None:
    result = runner.invoke(app, ["router", "--prefill", "p:1", "--decode", "http://d:1"])
    assert result.exit_code == 2
    assert "p:1" in result.output


# ---- doctor ------------------------------------------------------------------------------------


@pytest.fixture
def only_transports(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the doctor know these transports, each with its reason ("" if usable), and no libfabric."""
    monkeypatch.setattr(fabric, "find", lambda: (None, "libfabric.so.1: not found"))

    def know(**reasons: str) -> None:
        monkeypatch.setattr(doctor_module, "_known_transports", lambda: (reasons, ""))

    return know


def test_doctor_without_any_working_transport_fails_and_says_why(only_transports: Any) -> None:
    only_transports(nixl="libnixl_capi.so: not found")
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    (nixl,) = report["transports"]
    assert nixl["detail"] == "libnixl_capi.so: not found"
    assert nixl["how_to_get"] == "pip install 'kvpush[nixl]'"
    assert {
        "kvpush",
        "python",
        "gpus",
        "nics",
        "nixl",
        "libfabric",
        "fabric",
        "rails",
        "vllm",
        "missing",
    } <= set(report)
    assert any(line.startswith("libfabric: libfabric.so.1: not found.") for line in report["missing"])


def test_doctor_prints_for_people(only_transports: Any) -> None:
    only_transports(nixl="[not] found")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "not here" in result.output
    assert "[not] found" in result.output


def test_doctor_lists_rails_and_marks_those_of_the_environment(
    only_transports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_transports()
    rails = [
        {
            "provider": "efa",
            "protocol": "efa protocol 11.4",
            "domain": f"rdmap{i}s27-rdm",
            "device": f"rdmap{i}s27",
            "address": "",
            "pci": f"0000:{i}:1b.0",
            "numa_node": i,
            "gbit_per_s": 200.0 * i,
            "chosen": i == 1,
        }
        for i in range(2)
    ]
    asked: list[Any] = []

    def fabric_rails(*args: Any) -> Any:
        asked.append(args)
        return rails

    monkeypatch.setenv("KVPUSH_FABRIC_RAILS", "rdmap1s27")
    monkeypatch.setattr("kvpush._core.fabric_rails", fabric_rails)
    shown = runner.invoke(app, ["doctor"]).output
    assert "rdmap1s27-rdm (efa, 200 Gbit/s, NUMA node 1)" in shown
    assert "rdmap0s27" not in shown
    assert asked[0][2] == ("rdmap1s27",)
    assert json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)["rails"] == rails


def test_doctor_outlives_a_self_test_that_dies(only_transports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only_transports(bad="", worse="")
    real = subprocess.run

    def dying(argv: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        if argv[-1] == "bad":
            argv = [sys.executable, "-c", "import os; os.abort()"]
        elif argv[-1] == "worse":
            raise subprocess.TimeoutExpired(argv, 1)
        return real(argv, **kwargs)

    monkeypatch.setattr(subprocess, "run", dying)
    report = doctor_module.examine()
    assert [transport.ok for transport in report.transports] == [False, False]
    assert "died" in report.transports[0].detail
    assert "hung" in report.transports[1].detail


def test_doctor_says_that_the_native_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpush", None)
    known, problem = doctor_module._known_transports()
    assert known == {}
    assert "native module" in problem


def test_self_test_of_an_unknown_transport_is_a_result_and_no_exception() -> None:
    result = selftest.run("no-such-transport")
    assert not result.ok
    assert result.error


def test_what_a_self_test_warned_of_is_said() -> None:
    noise = "kvpush warning: the path is slow\nUCX says something\nkvpush warning: slots elsewhere\n"
    assert doctor_module._warnings(noise) == "the path is slow; slots elsewhere"


def test_compare_finds_each_kind_of_damage() -> None:
    size = selftest._unit_bytes()
    source, before = bytes(selftest._random_bytes(1)), bytes(selftest._random_bytes(2))
    good = bytearray(before)
    good[5 * size : 6 * size] = source[3 * size : 4 * size]
    assert selftest._compare(source, before, bytes(good), [3], [5]) == ""
    for offset in (5 * size, 6 * size - 1, 6 * size, 5 * size - 1):
        bad = bytearray(good)
        bad[offset] ^= 1
        assert f"block {offset // size} " in selftest._compare(source, before, bytes(bad), [3], [5])


def test_a_working_transport_passes() -> None:
    kvpush = pytest.importorskip("kvpush")
    if not hasattr(kvpush, "Engine"):
        pytest.skip("the native module is not built")
    result = runner.invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    shm = next(transport for transport in report["transports"] if transport["name"] == "shm")
    assert shm["ok"], shm["detail"]
    assert shm["gb_per_s"] > 0
    assert 0 < shm["network_ops_per_round"] < selftest.NUM_BLOCKS // 2
    assert result.exit_code == 0


def test_the_providers_of_libfabric_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that can be used with the rate of a real transfer, the others with the reason why not."""
    found, reason = fabric.find()
    if found is None:
        pytest.skip(reason)
    usable = [each.name for each in found.providers if each.usable]
    assert set(usable) & {"efa", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "net"}
    assert all(each.detail and not each.protocol for each in found.providers if not each.usable)
    kept = next(each for each in found.providers if each.name in ("tcp", "tcp;ofi_rxm", "net"))
    known = fabric.Libfabric(found.library, found.version, [kept])
    known.providers.append(
        fabric.Provider("odd", "1.0", "", False, usable=False, detail="it has [no] writes")
    )
    known.providers.append(fabric.Provider("gone", "1.0", "1.0", False, usable=True))
    monkeypatch.setattr(fabric, "find", lambda: (known, ""))
    monkeypatch.setattr(doctor_module, "_known_transports", lambda: ({}, ""))
    report = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert (report["libfabric"], report["fabric"]["library"]) == (found.version, found.library)
    real, odd, gone = report["fabric"]["providers"]
    assert real["ok"], real["detail"]
    assert real["gb_per_s"] > 0
    assert (odd["ok"], odd["detail"]) == (False, "it has [no] writes")
    assert not gone["ok"]
    assert "gone" in gone["detail"]
    printed = " ".join(runner.invoke(app, ["doctor"]).output.split())
    assert f"libfabric {found.version}: its providers" in printed
    assert "it has [no] writes" in printed


def test_a_library_that_is_no_libfabric_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_FABRIC_LIBRARY", "/nowhere/libfabric.so.1")
    found, reason = fabric.find()
    assert found is None
    assert "/nowhere/libfabric.so.1" in reason


def test_nics_are_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "net" / "lo").mkdir(parents=True)  # no hardware behind it: left out
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    (tmp_path / "net" / "eth0" / "operstate").write_text("up\n")
    (tmp_path / "net" / "eth0" / "speed").write_text("-1\n")
    assert host.nics(tmp_path) == [
        host.Nic("mlx5_0:1", "rdma", "ACTIVE", "400 Gb/sec (4X NDR)"),
        host.Nic("eth0", "net", "up", ""),
    ]


def test_without_a_driver_the_doctor_says_so_in_one_line(
    only_transports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_transports()
    monkeypatch.setenv("KVPUSH_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    gpus, reason = host.gpus()
    assert gpus == []
    assert "/nowhere/libcuda.so.1" in reason
    report = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert report["gpus"] == []
    (line,) = [line for line in report["missing"] if line.startswith("GPU: ")]
    assert reason in line
    assert "\n" not in line


def test_gpus_come_from_the_driver(
    fake_cuda: Path, only_transports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_transports()
    # In processes of their own: a driver that is loaded once stays.
    env = {**os.environ, "KVPUSH_CUDA_LIBRARY": str(fake_cuda), "FAKE_CUDA_DEVICES": "2"}
    code = "from kvpush.doctor import host; import json; gpus, why = host.gpus(); "
    code += "print(json.dumps([[g.__dict__ for g in gpus], why]))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    gpus, reason = json.loads(done.stdout)
    assert reason == ""
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    assert gpus[0]["compute"] == "9.0"
    assert len({gpu["uuid"] for gpu in gpus}) == 2
    monkeypatch.setattr(host, "gpus", lambda: ([host.Gpu(**gpu) for gpu in gpus], ""))
    for there, text in ((True, "kernels in this installation"), (False, "build kvpush with nvcc")):
        monkeypatch.setattr(host, "has_cuda_kernels", lambda there=there: there)
        assert gpus[1]["uuid"] in runner.invoke(app, ["doctor"]).output.replace("\n", "")
        assert text in " ".join(runner.invoke(app, ["doctor"]).output.split())
        assert json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)["cuda_kernels"] is there


@pytest.mark.parametrize(
    ("version", "good"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.31.2", False), ("1.0", False), ("x", False)],
)
def test_supported_vllm_versions(version: str, good: bool) -> None:
    assert host.vllm_supported(version) is good


@pytest.mark.vllm
def test_supported_vllm_versions_are_the_connectors() -> None:
    pytest.importorskip("vllm")
    assert pytest.importorskip("kvpush.vllm").SUPPORTED == host.VLLM_SUPPORTED


def test_vllm_plugins_variable_that_leaves_kvpush_out_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "kv_connector_module_path" in host._vllm_problem("0.32.0", True, True)
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvpush")
    monkeypatch.setattr(host, "version_of", lambda *names: None)
    assert host._vllm_problem("0.32.0", True, True) == ""
