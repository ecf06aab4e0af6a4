"""Builds the simulation with each fault of tests/sim/mutants.py in turn, and lets it look.

    python tests/sim/run_mutants.py [--of cuda] [--subset N] [--only NAME] [--runs N]

The seed of tests/sim/regressions.txt that names the mutant comes first, then seeds from 1 on, then small
worlds; the first objection counts. With --of cuda the faults are those of tests/sim/cuda_mutants.py, and
tests/cpp/test_copy_walk.cpp looks. Exit status 1 if one survives or no longer applies.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from cuda_mutants import CUDA_MUTANTS
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "mutants"
TIMEOUT_S = 120
WALK_TEST = "test_copy_walk"


def known_seeds() -> dict[str, list[str]]:
    """Of each mutant that a regression names: the arguments that replay it."""
    seeds = {}
    for line in (ROOT / "tests" / "sim" / "regressions.txt").read_text().splitlines():
        for mutant in MUTANTS:
            if f"({mutant.name})" in line and not line.startswith("#"):
                seed, world, _ = line.split(maxsplit=2)
                seeds[mutant.name] = ["--seed", seed, "--world", world]
    return seeds


def build_whole(program: str) -> None:
    command = ["cmake", "-S", ROOT, "-B", OUT, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    command += ["-DKVPUSH_BUILD_TESTS=ON", "-DKVPUSH_NIXL=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    jobs = str(os.cpu_count())
    subprocess.run(
        ["cmake", "--build", OUT, "--target", program, "-j", jobs], check=True, stdout=subprocess.DEVNULL
    )


def build(mutant: Mutant, program: str) -> Path:
    """Only what has the fault, linked before the objects and libraries that have the rest."""
    scratch = OUT / "changed" / mutant.name
    shutil.rmtree(scratch, ignore_errors=True)
    changed = scratch / mutant.file
    changed.parent.mkdir(parents=True)
    changed.write_text((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))
    # A header that has a fault is used by the sources beside it, or by the test of the walk alone.
    users = ("csrc/pack/",) if changed.suffix == ".hpp" else (mutant.file,)
    own = sorted((OUT / "CMakeFiles" / f"{program}.dir").rglob("*.o"))
    if program == WALK_TEST:
        users, own = (f"tests/cpp/{WALK_TEST}.cpp", "tests/cuda/play_copy.cpp"), []
    objects = []
    for entry in json.loads((OUT / "compile_commands.json").read_text()):
        source = Path(entry["file"]).relative_to(ROOT)
        if not str(source).startswith(users):
            continue
        words = shlex.split(entry["command"])
        objects.append(str(scratch / f"{source.stem}.o"))
        flags = [w for w in words[1:] if w.startswith(("-I", "-D", "-O", "-std", "-f"))]
        file = scratch / source if (scratch / source).exists() else ROOT / source
        command = [words[0], f"-I{scratch / 'csrc'}", *flags, "-w", "-c", str(file), "-o", objects[-1]]
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=entry["directory"])
    simulation = scratch / program
    command = [
        words[0],
        *own,
        *dict.fromkeys(objects),
        *([OUT / "libkvpush_check.a"] if program == WALK_TEST else []),
        OUT / "libkvpush_core.a",
        "-pthread",
        "-ldl",
        "-lrt",
        "-o",
        simulation,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return simulation


def look(simulation: Path, *args: str) -> str:
    """What the simulation objects to, or nothing."""
    try:
        done = subprocess.run(
            [simulation, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    lines = done.stdout.decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(("seed ", "FAIL")) or ", after:" in line]
    return "" if done.returncode == 0 else (said or lines or ["it failed"])[0]


def judge(mutant: Mutant, program: str, tries: list[list[str]]) -> tuple[bool, str, float]:
    begin = time.monotonic()
    said = ""
    if (ROOT / mutant.file).read_text().count(mutant.old) != 1:
        return False, "NO LONGER APPLIES", 0
    try:
        built = build(mutant, program)
    except subprocess.CalledProcessError as error:
        if "static assertion failed" in error.stderr:
            return True, "a static assertion fails", time.monotonic() - begin
        return False, f"DOES NOT BUILD\n{error.stderr}", time.monotonic() - begin
    for args in tries:
        said = said or look(built, *args)
    shutil.rmtree(built.parent)
    return bool(said), said, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=("sim", "cuda"), default="sim", help="which faults")
    parser.add_argument("--subset", type=int, help="only the first N")
    parser.add_argument("--only", action="append", help="only this one; may be repeated")
    parser.add_argument("--runs", type=int, default=2000, help="seeds per mutant, at most")
    args = parser.parse_args()
    program, mutants = ("kvpush_sim", MUTANTS) if args.of == "sim" else (WALK_TEST, CUDA_MUTANTS)
    chosen = [m for m in mutants[: args.subset] if not args.only or m.name in args.only]
    tries: dict[str, list[list[str]]] = {m.name: [[]] for m in chosen}
    if args.of == "sim":
        known = known_seeds()
        common = [["--runs", str(args.runs)], ["--exhaustive", "--states", "2000"]]
        tries = {m.name: ([known[m.name]] if m.name in known else []) + common for m in chosen}

    begin = time.monotonic()
    build_whole(program)
    if said := look(OUT / program, *(["--runs", "100"] if args.of == "sim" else [])):
        print(f"the unchanged tree fails: {said}")
        return 1
    print(f"{time.monotonic() - begin:.0f} s for the unchanged tree", flush=True)
    bad = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {pool.submit(judge, m, program, tries[m.name]): m for m in chosen}
        for job in as_completed(jobs):
            mutant = jobs[job]
            found, said, seconds = job.result()
            bad += not found
            verdict = "found" if found else "SURVIVES"
            print(f"{verdict:9}{mutant.name:30}{seconds:5.0f} s  {said}", flush=True)
            if not found:
                print(f"{'':9}{mutant.what} ({mutant.file})", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} found in {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
