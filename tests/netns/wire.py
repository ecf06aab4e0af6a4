"""A wire between two TUN interfaces that it makes: packets arrive late, in order, and some never.

Prints "ready" when the interfaces are there, and runs until it is killed; they go with it.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import os
import random
import select
import struct
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
MAX_PACKET_BYTES = 65536


def open_end(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("names", nargs=2)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    ends = [open_end(name) for name in options.names]
    other = dict(zip(ends, reversed(ends), strict=True))
    print("ready", flush=True)

    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            packet = os.read(end, MAX_PACKET_BYTES)
            if dice.random() >= options.loss:
                under_way.append((time.monotonic() + options.delay_ms / 1e3, other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            try:
                os.write(end, packet)
            except OSError:  # the interface is down, or has no room: one more is lost
                continue


if __name__ == "__main__":
    main()
