"""The prompts of the demo. Prompts that run at the same time share no prefix."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One prompt: a label for the table, its text, how many tokens to generate."""

    label: str
    text: str
    max_tokens: int = 16


_LIGHTHOUSE = (
    "The lighthouse stood at the end of a long spit of rock, and in winter the path to it was under water "
    "twice a day. The keeper wrote down every ship that passed: its name, its flag, the hour, and the state "
    "of the sea. In the first years he wrote with a steel pen; later his daughter wrote for him while he "
    "called the names from the gallery. When fog came they rang the bell by hand, one stroke every twenty "
    "seconds, and took turns through the night. The books filled a shelf, then a wall. "
)
_RIVER = (
    "Before the bridge was built, people crossed the river with a ferry that hung on a rope. The ferryman "
    "set the rudder at an angle and let the current do the work. A crossing took nine minutes when the water "
    "was low and four when it was high, and when it was very high there was no crossing at all. Farmers "
    "brought apples and hens, the doctor brought his bag, and on Sundays there was a queue on both banks. "
)
_CLOCK = (
    "A pendulum clock loses time when it gets warm, because the rod grows longer and the swing gets slower. "
    "Makers tried wood, glass and mercury; in the end an alloy of iron and nickel was found that hardly "
    "changes its length. A good clock in a deep cellar was then right to a hundredth of a second per day. "
)

_SHARED_PREFIX = (
    "You are the archivist of a small museum by the sea. Answer from these notes.\n" + _LIGHTHOUSE * 2
)

STAGES: tuple[tuple[Prompt, ...], ...] = (
    (Prompt("short", "The capital of France is"),),
    # Longer than max_num_batched_tokens: several prefill steps, each pushed as it ends.
    (
        Prompt(
            "long",
            "Read the three stories and say what they have in common.\n"
            + _RIVER * 3
            + _CLOCK * 3
            + _LIGHTHOUSE * 2
            + "\nAll three stories are about",
        ),
    ),
    (
        Prompt("concurrent 1", "Water boils at a temperature of"),
        Prompt("concurrent 2", _CLOCK + "The best material for the rod of a pendulum is"),
        Prompt("concurrent 3", "Question: how was the river crossed?\n" + _RIVER + "\nAnswer:"),
        Prompt("concurrent 4", "Count: one, two, three, four,"),
    ),
    (Prompt("shared prefix, first", _SHARED_PREFIX + "\nIn short: when fog came, the bell was"),),
    # Sent after the one above is done: D then has the common blocks in its prefix cache.
    (Prompt("shared prefix, second", _SHARED_PREFIX + "\nIn short: the books of the keeper hold"),),
)
"""Stages run one after the other; the prompts of one stage run at the same time."""
