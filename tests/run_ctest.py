"""Runs ctest with the libraries that transports load: run_ctest.py --preset PRESET [ARGUMENTS OF CTEST]."""

from __future__ import annotations

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    try:
        from kvpush.config import fabric_libraries, find_nixl_library

        nixl, fabrics = find_nixl_library(), fabric_libraries(os.environ.get("KVPUSH_FABRIC_LIBRARY", ""))
    except ImportError as error:
        # Before the package is installed: the tests take the libfabric that the loader finds.
        print(f"run_ctest.py: no libraries of wheels: {error}")
        nixl, fabrics = None, [os.environ.get("KVPUSH_FABRIC_LIBRARY", "")]
    if "tsan" in arguments:
        nixl = None  # its libraries crash there at the start
    if "asan" in arguments or "tsan" in arguments:
        fabrics = fabrics[-1:]  # sanitizers look at our code, which either library calls alike
    found = {"KVPUSH_NIXL_LIBRARY": os.environ.get("KVPUSH_NIXL_LIBRARY") or nixl or ""}
    codes = []
    for i, fabric in enumerate(fabrics):
        which = ["-R", "^test_fabric$"] if i > 0 else []
        print(f"run_ctest.py: libfabric {fabric or 'of the loader'}", flush=True)
        environment = {**os.environ, **found, "KVPUSH_FABRIC_LIBRARY": fabric}
        codes.append(subprocess.call(["ctest", *arguments, *which], env=environment))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
