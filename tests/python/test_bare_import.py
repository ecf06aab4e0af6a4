"""`import kvpush` is light: it loads no framework and little else."""

import json
import subprocess
import sys

FORBIDDEN = {
    "torch",
    "vllm",
    "numpy",
    "nixl",
    "nixl_cu13",
    "typer",
    "rich",
    "httpx",
    "typing_extensions",
    "asyncio",
}
# Standard library and kvpush together, on top of what the interpreter starts with.
MAX_MODULES = 120


def new_modules(statement):
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    command = [sys.executable, "-I", "-c", code]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_import_is_light():
    modules = new_modules("import kvpush")
    assert "kvpush._core" in modules
    assert FORBIDDEN.isdisjoint(name.split(".")[0] for name in modules)
    assert not [name for name in modules if name.startswith(("kvpush.cli", "kvpush.vllm", "kvpush.bench"))]
    assert len(modules) <= MAX_MODULES, modules


def test_all_names_exist():
    assert new_modules("import kvpush; [getattr(kvpush, name) for name in kvpush.__all__]")
