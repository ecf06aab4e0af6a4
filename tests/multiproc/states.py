"""Every state of the protocol in which a process can die or stop, and how to get there."""

from __future__ import annotations

import signal

from workers import BLOCK_BYTES, BOUND_S, Worker, until

SOURCE, TARGET = [5, 6], [2, 3]


def _known(p: Worker) -> None:
    until(lambda: p.stats()["open_claims"] == 1, "P has the claim")


def claimed(p: Worker, d: Worker, peer: str, key: str) -> None:
    """P knows that D will want the key: INTENT, no OPEN."""
    d.expect(peer, key)
    _known(p)


def open_unread(p: Worker, d: Worker, peer: str, key: str) -> None:
    """OPEN is on its way. P is left stopped."""
    p.signal(signal.SIGSTOP)
    d.receive(peer, key, TARGET)
    d.stats()  # answered by the thread that has sent it


def opened(p: Worker, d: Worker, peer: str, key: str) -> None:
    """OPEN waits for a push."""
    d.receive(peer, key, TARGET)
    _known(p)


def accepted(p: Worker, d: Worker, peer: str, key: str) -> None:
    """ACCEPT, and no box yet."""
    p.push(key, [], False)
    opened(p, d, peer, key)


def _boxes(p: Worker, d: Worker, peer: str, key: str, blocks: list[int]) -> None:
    accepted(p, d, peer, key)
    before = d.stats()["bytes_received"]
    p.advance(key, blocks, False)
    until(
        lambda: d.stats()["bytes_received"] == before + BLOCK_BYTES * len(blocks),
        "D has unpacked these blocks",
    )


def mid_boxes(p: Worker, d: Worker, peer: str, key: str) -> None:
    """One block of two has come."""
    _boxes(p, d, peer, key, SOURCE[:1])


def boxes_out_no_end(p: Worker, d: Worker, peer: str, key: str) -> None:
    """All boxes have come, END has not been sent."""
    _boxes(p, d, peer, key, SOURCE)


def boxes_unread(p: Worker, d: Worker, peer: str, key: str) -> None:
    """P has packed and posted all and ended it; D has read nothing of that. D is left stopped."""
    accepted(p, d, peer, key)
    d.signal(signal.SIGSTOP)
    p.advance(key, SOURCE)
    assert p.event(key, BOUND_S) == ("sent", "ok")


def end_unseen(p: Worker, d: Worker, peer: str, key: str) -> None:
    """All boxes have come, END is on its way. D is left stopped."""
    boxes_out_no_end(p, d, peer, key)
    d.signal(signal.SIGSTOP)
    p.advance(key, [])
    assert p.event(key, BOUND_S) == ("sent", "ok")


def received_no_done(p: Worker, d: Worker, peer: str, key: str) -> None:
    """D has received; P has not read its DONE. P is left stopped."""
    end_unseen(p, d, peer, key)
    p.signal(signal.SIGSTOP)
    d.signal(signal.SIGCONT)
    assert d.event(key, BOUND_S) == ("received", "ok")


def idle(p: Worker, d: Worker, peer: str, key: str) -> None:
    """Nothing is open on the session."""


STATES = [
    claimed,
    open_unread,
    opened,
    accepted,
    mid_boxes,
    boxes_out_no_end,
    boxes_unread,
    end_unseen,
    received_no_done,
    idle,
]
# In which a test finds P, or D, stopped already.
P_STOPPED = [open_unread, received_no_done]
D_STOPPED = [boxes_unread, end_unseen]
# In which P's push has not ended.
PUSH_OPEN = [accepted, mid_boxes, boxes_out_no_end]
