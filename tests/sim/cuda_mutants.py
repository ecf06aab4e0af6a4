"""Small faults in what the GPU's kernels decide, that tests/cpp/test_copy_walk.cpp must find."""

from mutants import Mutant

WALK = "csrc/pack/cuda/copy_walk.hpp"

CUDA_MUTANTS = [
    Mutant(
        "last_tile_forgotten",
        WALK,
        "(num_chunks() + kTileChunks - 1) / kTileChunks",
        "num_chunks() / kTileChunks",
        "a plane's last, shorter tile is not copied",
    ),
    Mutant(
        "tile_beyond_the_plane",
        WALK,
        "bool valid() const { return chunk_ < num_chunks_; }",
        "bool valid() const { return chunk_ <= num_chunks_; }",
        "one chunk more than the plane has",
    ),
    Mutant(
        "planes_overlap",
        WALK,
        "(plane().unit_bytes_before - args_.planes[args_.plane_begin].unit_bytes_before)",
        "plane().unit_bytes_before",
        "a part of a group is packed behind the planes that are not in it",
    ),
    Mutant(
        "first_plane_again",
        WALK,
        "plane() const { return args_.planes[args_.plane_begin + plane_]; }",
        "plane() const { return args_.planes[plane_]; }",
        "a part of a group begins with the group's first plane",
    ),
    Mutant(
        "tiles_left_out", WALK, "    tile_ += step_;\n", "    tile_ += step_ + 1;\n", "tiles are left out"
    ),
    Mutant(
        "tiles_not_carried",
        WALK,
        "      tile_ -= num_tiles;\n",
        "      tile_ = 0;\n",
        "warps that pass to the next plane all take its first tile",
    ),
    Mutant(
        "lanes_collide", WALK, "    chunk_ += kWarpThreads;\n", "    chunk_ += kWarpThreads / 2;\n", "twice"
    ),
    Mutant(
        "no_carry_to_the_next_row",
        WALK,
        "      in_row_ -= chunks_per_row_;\n      ++token_;\n",
        "      in_row_ -= chunks_per_row_;\n",
        "a row's end does not lead to the next",
    ),
    Mutant(
        "row_end_off_by_one",
        WALK,
        "    if (in_row_ >= chunks_per_row_) {",
        "    if (in_row_ > chunks_per_row_) {",
        "the first chunk behind a row is taken for its last",
    ),
    Mutant(
        "tokens_before_heads",
        WALK,
        "paged_offset(layout_, args_.block_ids[position_], head_, token_)",
        "paged_offset(layout_, args_.block_ids[position_], token_, head_)",
        "heads and tokens change places",
    ),
    Mutant(
        "no_carry_to_the_next_block",
        WALK,
        "      head_ -= num_heads_;\n      ++position_;\n",
        "      head_ -= num_heads_;\n",
        "every position reads the first block",
    ),
    Mutant(
        "position_for_block",
        WALK,
        "args_.block_ids[position_]",
        "static_cast<std::int64_t>(position_)",
        "the block table is not asked",
    ),
    Mutant(
        "sum_at_the_wrong_step",
        WALK,
        "first + std::int64_t{i} * kWarpThreads * Chunk::kBytes",
        "first + std::int64_t{i} * Chunk::kBytes",
        "chunks are weighted as if a thread's were neighbours",
    ),
    Mutant(
        "second_word_like_the_first",
        WALK,
        "sum.add(offset + std::int64_t{8} * word,",
        "sum.add(offset,",
        "both words of a chunk have the weight of the first",
    ),
    Mutant(
        "small_chunks_not_shifted",
        WALK,
        "sum_ += (value << (8 * (offset % 8))) *",
        "sum_ += value *",
        "a part of a word counts as its low bytes",
    ),
    Mutant(
        "unpacks_the_wrong_way",
        WALK,
        "targets[i] = kPacking ? dense : paged;",
        "targets[i] = dense;",
        "an unpack writes the slot",
    ),
    Mutant(
        "piece_across_rows",
        WALK,
        "num_bytes_ = left < kPieceBytes ?",
        "num_bytes_ = left < 0 ?",
        "the last piece of a row goes on into what follows it",
    ),
    Mutant(
        "pieces_of_whole_rows_only",
        WALK,
        "(static_cast<std::uint64_t>(layout.content_bytes) + kPieceBytes - 1) / kPieceBytes;",
        "static_cast<std::uint64_t>(layout.content_bytes) / kPieceBytes;",
        "a row's shorter last piece is not copied",
    ),
    Mutant(
        "stage_filled_too_early",
        WALK,
        "    load_next(stage ^ 1U);\n",
        "    load_next(stage);\n",
        "the next piece overwrites the one that is being moved",
    ),
]
