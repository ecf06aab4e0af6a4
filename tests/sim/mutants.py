"""Small faults put into a copy of the tree, one at a time: the simulation must find every one.

    python tests/sim/mutants.py [--subset N] [--only NAME] [--runs N]

Prints a table of who was found by what. Exit status 1 if one survives or no longer applies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    what: str


SENDER, RECEIVER = "csrc/protocol/sender.cpp", "csrc/protocol/receiver.cpp"
LINK, CURSOR = "csrc/protocol/link.cpp", "csrc/protocol/cursor.cpp"
CORE, SESSIONS = "csrc/engine/core.cpp", "csrc/engine/core_sessions.cpp"
SUM, ROWS = "csrc/pack/checksum.cpp", "csrc/pack/cpu/row_walk.hpp"

# The first ones are the subset of CI: each from another file, quick to build.
MUTANTS = [
    Mutant(
        "forgotten_credit",
        RECEIVER,
        "  out.credits.emplace_back(session, slot);\n",
        "  if (slot != 0) out.credits.emplace_back(session, slot);\n",
        "D never gives slot 0 back",
    ),
    Mutant(
        "no_digest_check",
        SENDER,
        "  if (push.digest != claim.digest) {",
        "  if (false) {",
        "P pairs whatever has the same key",
    ),
    Mutant(
        "no_duplicate_drop",
        LINK,
        "envelope.seq < boxes_in_order_ || !boxes_ahead_.insert(envelope.seq).second",
        "!boxes_ahead_.insert(envelope.seq).second && envelope.seq > boxes_in_order_",
        "a box that was seen before is taken again",
    ),
    Mutant(
        "lease_freed_unknown",
        CORE,
        "    if (fate == Fate::kUnknown) {\n      leases_.quarantine(",
        "    if (false) {\n      leases_.quarantine(",
        "a lease is used again while its post may still read it",
    ),
    Mutant(
        "stripe_off_by_one",
        CURSOR,
        "    if (pos_ == wanted_[range_].end) ++range_;",
        "    if (pos_ + 1 >= wanted_[range_].end) ++range_;",
        "the last position of a range is never sent",
    ),
    Mutant(
        "checksum_ignored",
        RECEIVER,
        "    if (checksum != unpack.checksum) {",
        "    if (false) {",
        "damaged data is taken",
    ),
    Mutant(
        "event_before_unpack_end",
        RECEIVER,
        "  if (entry.unpacking != 0) return;\n",
        "  if (entry.unpacking > 1) return;\n",
        "a receive can end with an unpack under way",
    ),
    Mutant(
        "event_before_pack_end",
        SENDER,
        "    if (push.packing != 0) return;\n    event.kind",
        "    event.kind",
        "a push can fail with a pack under way",
    ),
    Mutant(
        "sent_before_pack_end",
        SENDER,
        "  if (!push.finished || push.packing != 0) return;",
        "  if (!push.finished) return;",
        "sent and END do not wait for the last pack",
    ),
    Mutant(
        "sent_before_finish",
        SENDER,
        "  if (!push.finished || push.packing != 0) return;",
        "  if (push.packing != 0) return;",
        "sent does not wait for finish()",
    ),
    Mutant(
        "quiescent_always",
        SENDER,
        "found == pushes_.end() || found->second.packing == 0;",
        "found == pushes_.end() || found->second.packing <= 1;",
        "a retract does not wait for a running pack",
    ),
    Mutant(
        "fence_ignored",
        SENDER,
        "    if (!push.fenced && push.ending == FailCode::kNone) {",
        "    if (push.ending == FailCode::kNone) {",
        "packs start behind a fence",
    ),
    Mutant(
        "resume_one_further",
        SENDER,
        "      positions[g] = std::min(packed, static_cast<std::uint32_t>(ids.size()));",
        "      positions[g] = std::min(packed + 1, static_cast<std::uint32_t>(ids.size()));",
        "a retracted push skips a position",
    ),
    Mutant(
        "taken_unchecked",
        SENDER,
        "  if (push.claim) {\n    fail_claim(id, FailCode::kTaken, out);\n    return;\n  }\n",
        "",
        "a push serves two claims at a time",
    ),
    Mutant(
        "claim_timer_unarmed",
        SENDER,
        "  push_deadlines_.arm(handle, claimed ?",
        "  if (!claimed) push_deadlines_.arm(handle, claimed ?",
        "a claimed push waits for ever",
    ),
    Mutant(
        "tombstone_forgotten",
        SENDER,
        "  entry.tombstone = code;\n",
        "",
        "a late claim of a failed push waits instead of failing",
    ),
    Mutant(
        "hole_packed",
        SENDER,
        "static_cast<std::uint32_t>(std::find(from, ids.end(), -1) - ids.begin())",
        "static_cast<std::uint32_t>(ids.size())",
        "a box runs over a hole",
    ),
    Mutant(
        "missing_unnoticed",
        SENDER,
        "    if ((end > ids.size() && push.finished) || std::find(from, to, -1) != to) missing = true;",
        "    if (end > ids.size() && push.finished) missing = true;",
        "a wanted hole is waited for",
    ),
    Mutant(
        "units_miscounted",
        SENDER,
        "      claim.num_units += task.box.num_units();",
        "      claim.num_units += task.box.num_positions();",
        "END tells positions, not units",
    ),
    Mutant(
        "close_keeps_claims",
        SENDER,
        "    if (served || entry == keys_.end()) continue;",
        "    if (handle == 0 || served || entry == keys_.end()) continue;",
        "the end of a session does not reach pushes that were only claimed",
    ),
    Mutant(
        "pairing_timer_unarmed",
        RECEIVER,
        "  deadlines_.arm(transfer, now + timeouts_.pairing_us);\n",
        "",
        "a receive without a push waits for ever",
    ),
    Mutant(
        "cancel_untold",
        RECEIVER,
        "    if (tell && entry.claimed) out.messages",
        "    if (tell && !entry.claimed) out.messages",
        "P does not learn of a cancel",
    ),
    Mutant(
        "done_untold",
        RECEIVER,
        "    if (entry.claimed) out.messages.emplace_back(entry.session, Done{transfer});\n",
        "",
        "P's claim never ends",
    ),
    Mutant(
        "received_early",
        RECEIVER,
        "    if (!entry.end || entry.units_done != entry.units_wanted) return;",
        "    if (!entry.end) return;",
        "END alone completes a receive",
    ),
    Mutant(
        "wrong_block_offset",
        RECEIVER,
        "  unpack.block_ids.assign(blocks.begin() + (box.box.pos_begin - first),\n"
        "                          blocks.begin() + (box.box.pos_end - first));",
        "  unpack.block_ids.assign(blocks.begin(),\n"
        "                          blocks.begin() + (box.box.pos_end - box.box.pos_begin));",
        "every box is unpacked to the first blocks",
    ),
    Mutant(
        "discard_keeps_credit",
        RECEIVER,
        "  if (!known || found->second.ending != FailCode::kNone) {\n"
        "    give_back(session_id, box.slot, out);\n",
        "  if (!known || found->second.ending != FailCode::kNone) {\n",
        "a box of an ended transfer costs a credit",
    ),
    Mutant(
        "wanted_merges_holes",
        RECEIVER,
        "      if (block >= 0) {\n        if (!wanted",
        "      if (block >= -1) {\n        if (!wanted",
        "D wants its holes",
    ),
    Mutant(
        "incarnation_unchecked",
        LINK,
        "  if (envelope.sender != peer_) return {};\n",
        "",
        "a message of another life is taken",
    ),
    Mutant(
        "box_loss_unnoticed",
        LINK,
        "  const bool open = messages_in_order_ < promised_messages_ || boxes_seen() < promised_boxes_;",
        "  const bool open = messages_in_order_ < promised_messages_;",
        "a lost box is never missed",
    ),
    Mutant(
        "silence_unnoticed",
        LINK,
        "  if (now - last_heard_ >= peer_timeout_us_) {",
        "  if (now - last_heard_ >= 50 * peer_timeout_us_) {",
        "a dead peer is not given up in time",
    ),
    Mutant(
        "late_turn_judged",
        CORE,
        "  if (late > config_.timeouts.peer_us / 2) {",
        "  if (late < 0) {",
        "an engine that slept blames its peers",
    ),
    Mutant(
        "credit_lost_on_unwanted_pack",
        CORE,
        "    session.free_slots.push_back(work.slot);\n    if (work.lease",
        "    if (work.lease",
        "a pack that nobody wants any more costs a credit",
    ),
    Mutant(
        "lease_leaked_on_close",
        SESSIONS,
        "    if (work->second.lease.data != nullptr) leases_.give_back(work->second.lease);\n",
        "",
        "posts that wait when a session ends keep their leases",
    ),
    Mutant(
        "transport_closed_early",
        SESSIONS,
        "    if (session.state != State::kClosed || session.local_work != 0) {",
        "    if (session.state != State::kClosed) {",
        "a session goes with a pack or unpack under way",
    ),
    Mutant(
        "landing_freed_early",
        SESSIONS,
        "      over = transport_.landing_quiet(it->first);",
        "      over = true;",
        "a landing is freed while its peer may write",
    ),
    Mutant(
        "quiet_with_unknown_fate",
        SESSIONS,
        "      if (!session.unknown_fate) {",
        "      if (true) {",
        "P calls a session quiet whose post may still write",
    ),
    Mutant(
        "given_up_offer_kept",
        SESSIONS,
        " || old->second.peer == Incarnation{};",
        ";",
        "a landing whose answer never came stays in quarantine",
    ),
    Mutant(
        "sum_wrong_end",
        SUM,
        "  fold(offset_);\n  return sum_;",
        "  return sum_;",
        "the last piece of a box is not summed",
    ),
    Mutant(
        "run_of_blocks",
        ROWS,
        "ids_[next_id_] == ids_[next_id_ - 1] + 1) ++next_id_;",
        "ids_[next_id_] > ids_[next_id_ - 1]) ++next_id_;",
        "blocks that do not touch are copied as one run",
    ),
    Mutant(
        "head_stride",
        "csrc/pack/pack_unit.hpp",
        "    if (layout.num_heads == 1 || layout.head_stride_bytes == layout.content_bytes) {",
        "    if (layout.num_heads != 3) {",
        "heads with a gap between them are copied as one run",
    ),
]


def copy_changed(source: str, target: str) -> None:
    """A file that is the same keeps its time, one that differs gets a new one: as the build needs it."""
    to = Path(target)
    if not to.exists() or to.read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, target)


def build(tree: Path, out: Path) -> bool:
    done = subprocess.run(
        ["cmake", "--build", str(out), "--target", "kvpush_sim", "-j", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-20:]))
    return done.returncode == 0


def judge(out: Path, runs: int) -> tuple[bool, str]:
    """Whether the simulation objects, and its first word on it."""
    command = [str(out / "kvpush_sim"), "--exhaustive", "--states", "2000", "--runs", str(runs)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True, f"no end within {TIMEOUT_S} s"
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode < 0:
        return True, f"signal {-done.returncode}"
    said = [line for line in lines if line.startswith("seed ") or ", after:" in line]
    return done.returncode != 0, (said or lines or [""])[0][:100]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subset", type=int, default=len(MUTANTS), help="only the first N")
    parser.add_argument("--only", action="append", help="only this one; may be repeated")
    parser.add_argument("--runs", type=int, default=600, help="seeds per mutant")
    parser.add_argument("--build", type=Path, help="folder of the copy and its build; kept")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS[: args.subset] if not args.only or m.name in args.only]

    with tempfile.TemporaryDirectory() as scratch:
        base = args.build or Path(scratch)
        tree, out = base / "tree", base / "out"
        for part in ("csrc", "cmake", "tests", "python/kvpush/_version.py", "CMakeLists.txt"):
            source, target = ROOT / part, tree / part
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy_changed)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                copy_changed(str(source), str(target))
        subprocess.run(
            ["cmake", "-S", tree, "-B", out, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
            + ["-DKVPUSH_BUILD_TESTS=ON", "-DKVPUSH_NIXL=OFF"]
            + (["-G", "Ninja"] if shutil.which("ninja") else []),
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ,
        )
        if not build(tree, out):
            return 1
        found, said = judge(out, args.runs)
        if found:
            print(f"the unchanged tree fails: {said}")
            return 1
        bad = 0
        for mutant in chosen:
            path = tree / mutant.file
            text = path.read_text()
            begin = time.monotonic()
            if text.count(mutant.old) < 1:
                found, said = False, "NO LONGER APPLIES"
            else:
                path.write_text(text.replace(mutant.old, mutant.new, 1))
                built = build(tree, out)
                found, said = judge(out, args.runs) if built else (False, "DOES NOT BUILD")
                path.write_text(text)
            bad += not found
            verdict = "found" if found else "SURVIVES"
            print(f"{verdict:9}{mutant.name:30}{time.monotonic() - begin:5.0f} s  {said}", flush=True)
            if not found:
                print(f"{'':9}{mutant.what} ({mutant.file})", flush=True)
        print(f"{len(chosen) - bad} of {len(chosen)} found")
        return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
