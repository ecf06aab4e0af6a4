"""The rule of the tree: what each directory may include or import. Anything not listed is forbidden."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "kvpush"

# Directory of csrc/ to what its files may include; a folder stands for the files right in it.
ALLOWED = {
    "base": {"base"},
    "cache": {"base", "cache"},
    "protocol": {"base", "cache", "protocol"},
    "pack": {"base", "cache", "pack"},
    "pack/cpu": {"base", "cache", "pack", "pack/cpu"},
    "pack/cuda": {"base", "cache", "shim", "pack", "pack/cuda"},
    "shim": {"base", "shim"},
    "transport": {"base", "shim", "transport"},
    "transport/shm": {"base", "shim", "transport", "transport/shm"},
    "transport/nixl": {"base", "shim", "transport", "transport/nixl"},
    "transport/fabric": {"base", "shim", "transport", "transport/fabric"},
    "transport/fault": {"base", "transport", "transport/fault"},
    "engine": {"base", "cache", "protocol", "pack", "transport", "engine"},
    "bindings": {
        *("base", "cache", "engine", "pack", "pack/cpu", "pack/cuda", "shim", "bindings"),
        *("transport", "transport/shm", "transport/nixl", "transport/fabric", "transport/fault"),
    },
}

# A pure state machine has no use for these.
IMPURE = re.compile(
    r"(thread|mutex|shared_mutex|condition_variable|atomic|future|semaphore|chrono|ctime|random|"
    r"iostream|fstream|cstdio|stdio\.h|unistd\.h|fcntl\.h|poll\.h|time\.h|sys/.*|netinet/.*|pthread\.h)$"
)
VENDOR = re.compile(r"(torch|ATen|c10|cuda|nccl|cublas|rdma|infiniband|nixl|ucp?)[/_.a-z]*")

# Folder of the package to the packages that its modules may import at their top level.
THIRD_PARTY = {
    ".": set(),
    "cli": {"typer", "rich", "uvicorn"},
    "router": {"starlette", "httpx"},
    "demo": {"rich", "httpx"},
    "doctor": set(),
    "bench": {"rich", "numpy"},
    "vllm": {"vllm", "torch", "numpy", "msgspec", "zmq", "prometheus_client"},
}


def sources(*suffixes):
    return sorted(path for path in CSRC.rglob("*") if path.suffix in suffixes)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imports(path, top_level_only=False):
    """Dotted names that a module imports; those under TYPE_CHECKING are not counted."""
    names = []
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending += ast.iter_child_nodes(node)
    return names


def test_every_directory_is_listed():
    found = {str(path.parent.relative_to(CSRC)) for path in sources(".hpp", ".cpp")}
    assert found <= set(ALLOWED)
    assert {"base", "cache", "pack"} <= found


@pytest.mark.parametrize("directory", sorted(ALLOWED))
def test_includes_of(directory):
    wrong = []
    for path in sources(".hpp", ".cpp", ".cuh", ".cu"):
        if str(path.parent.relative_to(CSRC)) != directory:
            continue
        for mark, name in includes(path):
            if mark == '"' and str(Path(name).parent) not in ALLOWED[directory]:
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def test_own_headers_are_quoted_from_the_root():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(".hpp", ".cpp")
        for mark, name in includes(path)
        if mark == '"' and not (CSRC / name).is_file()
    ]
    assert wrong == []


def test_pybind11_only_in_bindings():
    users = {
        str(path.parent.relative_to(CSRC))
        for path in sources(".hpp", ".cpp")
        if any(name.startswith(("pybind11/", "Python.h")) for _, name in includes(path))
    }
    assert users <= {"bindings"}


def test_no_vendor_headers():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(".hpp", ".cpp")
        for mark, name in includes(path)
        if mark == "<" and VENDOR.match(name)
    ]
    assert wrong == []


def test_protocol_is_pure():
    wrong = []
    for path in sources(".hpp", ".cpp"):
        if path.parent.name != "protocol":
            continue
        wrong += [
            f"{path.name}: <{name}>" for mark, name in includes(path) if mark == "<" and IMPURE.match(name)
        ]
        text = path.read_text()
        wrong += [
            f"{path.name}: {call}"
            for call in ("monotonic_us(", "random_uuid(", "base/log.hpp")
            if call in text
        ]
    assert wrong == []


def test_headers_stand_alone(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    headers = [path.relative_to(CSRC) for path in sources(".hpp") if path.parent.name != "bindings"]
    # Each in its own file, in one run: a missing include shows, and the compiler starts once.
    files = []
    for header in headers:
        file = tmp_path / (str(header).replace("/", "__") + ".cpp")
        file.write_text(f'#include "{header}"\n')
        files.append(str(file))
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{CSRC}", *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr


def test_only_kvpush_vllm_imports_vllm():
    wrong = []
    for path in modules():
        if "vllm" in path.relative_to(PACKAGE).parts or path.parts[-2:] == ("serve", "engine.py"):
            continue  # the second is the process that `kvpush bench serve` runs vLLM in
        wrong += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in imports(path)
            if name.split(".")[0] == "vllm" or name.startswith("kvpush.vllm")
        ]
    assert wrong == []


def test_third_party_imports_at_top_level():
    wrong = []
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        folder = parts[0] if len(parts) > 1 else "."
        allowed = THIRD_PARTY[folder] | {"kvpush"} | set(sys.stdlib_module_names)
        wrong += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in imports(path, top_level_only=True)
            if name.split(".")[0] not in allowed
        ]
    assert wrong == []


def test_core_modules_do_not_know_the_layers_above():
    for path in PACKAGE.glob("*.py"):
        if path.name != "__main__.py":
            above = [
                n for n in imports(path) if re.match(r"kvpush\.(cli|router|demo|doctor|bench|vllm)\b", n)
            ]
            assert above == [], path.name
