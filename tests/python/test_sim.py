"""The simulation reaches what it is for, and tests/sim/mutants.py still applies to this tree.

Running the mutants is `make mutants`; ctest replays tests/sim/regressions.txt.
"""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tests" / "sim" / "mutants.py"))["MUTANTS"]
WORLDS = {"random", "retry", "calm", "starved", "unclaimed", "ranks", "liars"}
FAULTS = {
    *("drop", "duplicate", "delay", "truncate", "corrupt", "corrupt data", "stray", "again"),
    *("post fails", "post unknown", "pack fails", "sleep", "all sleep", "crash", "disconnect"),
    *("transport loses a session", "wait for a forward"),
}
LIES = {
    *("box outside the wanted positions", "box outside the cache", "units sent twice", "box of another size"),
    *("wrong checksum", "slot out of range", "box in another slot", "transfer never issued", "empty box"),
    *("message as a notice", "notice as a message", "message of the wrong side", "FAIL of what goes well"),
    *("END before its time", "wrong totals", "wanted out of bounds", "empty wanted range", "wanted more"),
    *("wanted ranges overlap", "wanted of no group", "wanted less", "empty digest", "another digest"),
    *("another key", "credit twice", "credit of no slot", "credit of another slot", "credit withheld"),
    *("nothing given back", "OPEN twice", "DONE before END", "DONE of no transfer", "CANCEL of no transfer"),
    *("number of another message", "PING of what was never sent"),
}


def simulate(*args: object) -> str:
    """Its output; fails if the simulation does."""
    built = [ROOT / "build" / preset / "kvpush_sim" for preset in ("release", "debug")]
    there = sorted((p for p in built if p.exists()), key=lambda p: p.stat().st_mtime)
    if not there:
        pytest.skip("kvpush_sim is not built: make ctest")
    done = subprocess.run([there[-1], *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def counts(line: str) -> dict[str, int]:
    """Of "name 3, other name 5"."""
    return {m[1]: int(m[2]) for m in re.finditer(r"(?:^|[:,] )([A-Za-z_ ]+) (\d+)(?=,|$)", line)}


@pytest.mark.parametrize(("world", "faults"), [("random", FAULTS), ("retry", {"drop"}), ("liars", LIES)])
def test_every_fault_happens_and_most_transfers_go_well(world, faults):
    lines = simulate("--seed", 1, "--runs", 300, "--world", world).splitlines()
    happened = counts(next(line for line in lines if line.startswith("faults:")))
    assert faults - happened.keys() == set()
    said = next(line for line in lines if line.startswith(f"{world}:"))
    ends = counts(said.partition(" went well")[2])
    well = ends["sent"] + ends["received"]
    assert ends["sent"]
    assert ends["received"]
    assert 0.6 <= well / sum(ends.values()) <= 0.95, said


def test_regressions_are_clean():
    path = ROOT / "tests" / "sim" / "regressions.txt"
    assert "passed" in simulate("--regressions", path, "--runs", 1)
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        seed, world, sentence = line.split(maxsplit=2)
        assert seed.isdigit(), line
        assert world in WORLDS, line
        assert len(sentence) > 10, line
    assert len({tuple(line.split()[:2]) for line in lines}) == len(lines) >= 10


def test_every_mutant_applies_once():
    wrong = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in wrong.items() if count != 1} == {}


def test_mutants_are_told_apart():
    assert len(MUTANTS) >= 40
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.old != m.new and m.what for m in MUTANTS)
