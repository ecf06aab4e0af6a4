"""What the worker has launched on its GPU, as the engine's ``after``."""

from typing import Any


class Launched:
    """A CUDA event behind all work of the current stream; nothing where the cache is in host memory.

    The engine takes down what an event stands for when it is given it, so one event is recorded anew for each
    step. Worker thread only.
    """

    def __init__(self, device_type: str) -> None:
        self._on_cuda = device_type == "cuda"
        self._event: Any = None

    def so_far(self) -> int | None:
        """Return the handle of an event that completes when all that was launched until now has ended."""
        if not self._on_cuda:
            return None
        import torch

        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record()
        return int(self._event.cuda_event)
