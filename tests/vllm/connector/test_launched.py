"""The event that stands for what the worker has launched."""

from typing import Any

import pytest
import torch

from kvpush.vllm.launched import Launched


class Event:
    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.cuda_event = 0x1000
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1
        self.cuda_event += 1


def test_on_the_host_there_is_nothing_to_wait_for() -> None:
    assert Launched("cpu").so_far() is None


def test_one_event_is_recorded_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    launched: Any = Launched("cuda")
    assert [launched.so_far() for _ in range(3)] == [0x1001, 0x1002, 0x1003]
    assert Event.made == 1
