"""What an arm is: one system that moves the transfers of a batch, at P's end and at D's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpush.bench.cases import Case
from kvpush.bench.tables import Batch, Spans


class End:
    """One end of one arm, within a process of its own. Times are CLOCK_MONOTONIC nanoseconds.

    What P or D of an arm has no need for does nothing.
    """

    mode = ""  # of the variant whose round it is

    def begin(self, case: Case) -> bool:
        """Make ready for `case`; returns whether the ends must connect (the same at both)."""
        raise NotImplementedError

    def offer(self) -> bytes:
        """D: how P finds it."""
        return b""

    def answer(self, offer: bytes) -> bytes:
        """P: take D's offer."""
        return b""

    def establish(self, answer: bytes) -> None:
        """D: take P's answer; transfers may begin."""

    def open(self, batches: Sequence[Batch]) -> None:
        """D: ask for the transfers of these batches."""

    def submit(self, batch: Batch) -> list[int]:
        """P: send; returns when each transfer's submission began."""
        return []

    def drain(self) -> None:
        """P: wait until the blocks of all that was sent are the caller's again."""

    def wait(self, batch: Batch) -> tuple[list[int], list[int]]:
        """D: wait for all of a batch; returns when each was seen complete, and if D began them, when."""
        raise NotImplementedError

    def spans(self, batches: Sequence[Batch]) -> Spans:
        """Return what must have been copied."""
        raise NotImplementedError

    def network_ops(self) -> int:
        """Return the operations on the network of the last transfer, as far as this end knows."""
        return 0


@dataclass(frozen=True)
class Variant:
    """One line of the comparison: `arm` and `transport` as in the rows, `mode` as the end knows it.

    Of variants with the same arm and transport the fastest counts; `target` says what tells them apart.
    """

    arm: str
    transport: str
    mode: str = ""
    target: str = ""


@dataclass(frozen=True)
class PairSpec:
    """A pair of processes, and what it can do. `factory(memory, is_source)` makes an end."""

    name: str
    factory: Callable[[Any, bool], End]
    variants: tuple[Variant, ...]
