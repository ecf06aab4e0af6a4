"""Two network namespaces, P's and D's, joined by links that a test takes down and up."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workers import until

SIDES = ("p", "d")
_PREFIX = "kvpush-"
_numbers = itertools.count()


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


_ip = functools.partial(_run, "ip")


def _remove_orphans() -> None:
    """Namespaces of test runs that were killed."""
    for name in (line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(_PREFIX)):
        if not Path("/proc", name.split("-")[1]).exists():
            _ip("netns", "del", name)


class Network:
    """`num_rails` links; rail k is the interface rail<k> on both sides, P's 10.99.<k>.1 and D's 10.99.<k>.2.

    Raises OSError or CalledProcessError where namespaces cannot be had.
    """

    def __init__(self, folder: Path, num_rails: int = 1) -> None:
        _remove_orphans()
        self.num_rails = num_rails
        number = next(_numbers)
        self.names = {side: f"{_PREFIX}{os.getpid()}-{number}{side}" for side in SIDES}
        # What starts a process in a namespace. UCX would take shared memory, which namespaces do not part.
        self.programs = {side: folder / side for side in SIDES}
        try:
            for side, name in self.names.items():
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                run = f"exec ip netns exec {name} env UCX_TLS=tcp {sys.executable}"
                self.programs[side].write_text(f'#!/bin/sh\n{run} "$@"\n')
                self.programs[side].chmod(0o755)
            for rail in range(num_rails):
                self.add_link(rail)
                for host, name in enumerate(self.names.values(), start=1):
                    _ip("-n", name, "address", "add", f"10.99.{rail}.{host}/24", "dev", f"rail{rail}")
            self.set_links(up=True)
        except BaseException:
            self.close()
            raise

    def add_link(self, rail: int) -> None:
        p, d = self.names.values()
        ends = (f"rail{rail}", "netns", p, "type", "veth", "peer", "name", f"rail{rail}", "netns", d)
        _ip("link", "add", *ends)

    def set_link(self, rail: int, up: bool, side: str = "p") -> None:
        _ip("-n", self.names[side], "link", "set", f"rail{rail}", "up" if up else "down")

    def set_links(self, up: bool) -> None:
        rails = list(itertools.product(range(self.num_rails), SIDES))
        for rail, side in rails:
            self.set_link(rail, up, side)
        if up:
            # The kernel may take a second to say so, and libfabric does not see a link before.
            until(lambda: all(self.is_up(rail, side) for rail, side in rails), "all links are up")

    def is_up(self, rail: int, side: str) -> bool:
        (link,) = json.loads(_ip("-n", self.names[side], "-json", "link", "show", f"rail{rail}"))
        # That of a tunnel (LossyNetwork) is never known.
        return "LOWER_UP" in link["flags"] and link["operstate"] in ("UP", "UNKNOWN")

    def slow_down(self) -> None:
        """To 50 MB/s each way and for good, so that links fail while bytes are on them. Skips without tbf."""
        for rail, name in itertools.product(range(self.num_rails), self.names.values()):
            limits = ("tbf", "rate", "400mbit", "burst", "64kb", "latency", "100ms")
            try:
                _run("tc", "-n", name, "qdisc", "replace", "dev", f"rail{rail}", "root", *limits)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no slow links here: {getattr(error, 'stderr', error)}")

    def bytes_sent(self, rail: int) -> int:
        """By P, headers among them."""
        counters = json.loads(_ip("-n", self.names["p"], "-s", "-json", "link", "show", f"rail{rail}"))
        return int(counters[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for name in self.names.values():
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)


class LossyNetwork(Network):
    """One link through a process that delays and drops packets (wire.py): not every kernel has netem."""

    def add_link(self, rail: int) -> None:
        wire = Path(__file__).with_name("wire.py")
        ends = [f"kv{os.getpid()}{side}" for side in SIDES]
        command = [sys.executable, str(wire), "--delay-ms", "5", "--loss", "0.01", "--seed", "1", *ends]
        self.wire = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.wire.stdout is not None
        if self.wire.stdout.readline() != "ready\n":
            raise OSError(self.wire.communicate()[1])
        for end, name in zip(ends, self.names.values(), strict=True):
            _ip("link", "set", end, "netns", name, "name", f"rail{rail}")

    def close(self) -> None:
        if hasattr(self, "wire"):
            self.wire.kill()
            self.wire.communicate()
        super().close()


@contextlib.contextmanager
def made(kind: type[Network], folder: Path, num_rails: int = 1):
    """A network, or a skip that says why not; it is removed whatever happens."""
    try:
        network = kind(folder, num_rails)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield network
    finally:
        network.close()
