"""The faults of tests/sim/mutants.py are still faults of this tree; running them is `make mutants`."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "sim" / "mutants.py"))["MUTANTS"]


def test_every_mutant_applies_once():
    wrong = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in wrong.items() if count != 1} == {}


def test_mutants_are_told_apart():
    assert len(MUTANTS) >= 25
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.old != m.new and m.what for m in MUTANTS)


def test_regressions_are_seed_world_sentence():
    worlds = {"random", "retry", "calm", "starved", "unclaimed", "ranks", "liars"}
    for line in (ROOT / "tests" / "sim" / "regressions.txt").read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        seed, world, sentence = line.split(maxsplit=2)
        assert seed.isdigit(), line
        assert world in worlds, line
        assert len(sentence) > 10, line
