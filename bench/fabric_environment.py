"""What a measurement over libfabric depends on: limits, RDMA devices, modules, settings. One JSON object.

    python bench/fabric_environment.py > environment.json

Its "warnings" are what usually makes EFA or verbs slow or absent. Reads files and asks `fi_info`.
"""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

PREFIXES = ("FI_", "KVPUSH_", "UCX_", "NIXL_", "RDMAV_", "IBV_", "MLX5_", "NCCL_IB_")
SECRET = "KVPUSH_SECRET"
MODULES = ("efa", "ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "mlx5_ib", "nvidia_peermem", "gdrdrv")


def text(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def limit(which):
    soft, hard = ("unlimited" if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(which))
    return {"soft": soft, "hard": hard}


def rdma_devices():
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        device = port.parent.parent
        found.append(
            {
                "name": device.name,
                "driver": (device / "device" / "driver").resolve().name,
                "port": port.name,
                "state": text(port / "state"),
                "rate": text(port / "rate"),
                "link_layer": text(port / "link_layer"),
                "numa_node": text(device / "device" / "numa_node"),
            }
        )
    return found


def interfaces():
    found = {}
    for device in sorted(Path("/sys/class/net").iterdir()):
        names = ("mtu", "operstate", "speed")
        found[device.name] = {name: text(device / name) for name in names}
    return found


def fi_info():
    """`fi_info -l`, or why there is none."""
    if shutil.which("fi_info") is None:
        return "fi_info is not installed; `kvpush doctor` lists the providers too"
    done = subprocess.run(["fi_info", "-l"], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def warnings(found):
    drivers = {each["driver"] for each in found["rdma_devices"]}
    lines = []
    if not drivers:
        lines.append("no device in /sys/class/infiniband: neither efa nor verbs can work")
    elif found["limits"]["memlock"]["soft"] != "unlimited":
        lines.append("locked memory is limited (ulimit -l): every registered byte counts against it")
    if drivers and not os.access("/dev/infiniband", os.R_OK):
        lines.append("/dev/infiniband cannot be read: containers need the devices passed through")
    if any("ACTIVE" not in each["state"] for each in found["rdma_devices"]):
        lines.append("a port is not ACTIVE")
    if "efa" in drivers and found["settings"].get("FI_EFA_USE_DEVICE_RDMA", "1").lower() in (
        *("0", "no", "off", "false"),
    ):
        lines.append("FI_EFA_USE_DEVICE_RDMA turns RDMA off: writes are then emulated by messages")
    if drivers - {"efa"} and "rdma_ucm" not in found["modules"]:
        lines.append("module rdma_ucm is not loaded: verbs needs librdmacm for its connections")
    return lines


def main():
    loaded = {line.split()[0] for line in text("/proc/modules").splitlines()}
    found = {
        "kind": "environment",
        "host": socket.gethostname(),
        "system": " ".join(os.uname()[i] for i in (0, 2, 4)),
        "num_cpus": len(os.sched_getaffinity(0)),
        "limits": {
            "memlock": limit(resource.RLIMIT_MEMLOCK),
            "nofile": limit(resource.RLIMIT_NOFILE),
            "hugepages": text("/proc/sys/vm/nr_hugepages"),
            "ptrace_scope": text("/proc/sys/kernel/yama/ptrace_scope"),
        },
        "rdma_devices": rdma_devices(),
        "interfaces": interfaces(),
        "modules": [name for name in MODULES if name in loaded],
        "fi_info": fi_info(),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name != SECRET
        },
    }
    found["warnings"] = warnings(found)
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
