// How a frame lies: for each layer, for each KV head, the K and V of the block's tokens.
//
// The unit of the vector kernels is a *sub-tile*: 16 tokens of one KV head, in *steps* of 32 elements (64 bytes in 16-bit dtypes):
//
//   K: one step for each pair of dimensions (d, d + 1):    16 tokens x 2 dimensions, step d / 2
//   V: one step for each pair of tokens and 16 dimensions: 2 tokens x 16 dimensions, step (t / 2) * (size / 16) + d / 16
//
// so that one load of K has 16 tokens in its lanes and one load of V has 16 dimensions: neither needs sums across lanes.
// Inside a step bfloat16 has the members of a pair side by side ([16][2], what dot products of pairs read), the others apart ([2][16]).
// Sizes are padded: K to even, V to a multiple of 16. The padding is written as zeros.
//
// Blocks of a multiple of 16 tokens are sub-tiles one after another, each K, then V. In blocks of any other size tokens are as they
// come, K [block_size][key_size], then V [block_size][value_size]: a sub-tile would waste memory; the kernels put them together anew.
#pragma once

#include "abi.h"

// In the namespace too: no copy of it that was compiled for a newer instruction set may be taken for an older one.
namespace KILBURN_ISA {

constexpr int kSubTile = 16;
constexpr int kStepElements = 32;

struct Layout {
  int element_bytes;
  int step_bytes;
  int key_steps;      // of one sub-tile's K
  int value_columns;  // steps of V for one pair of tokens
  int key_bytes;      // of one sub-tile's K
  int value_bytes;    // of one sub-tile's V
  bool tiled;         // the frames hold sub-tiles
  int64_t head_bytes;  // of one KV head in one block

  explicit Layout(const Layer& layer) {
    element_bytes = layer.element == kFloat32 ? 4 : 2;
    step_bytes = kStepElements * element_bytes;
    key_steps = (layer.key_size + 1) / 2;
    value_columns = (layer.value_size + 15) / 16;
    key_bytes = key_steps * step_bytes;
    value_bytes = kSubTile / 2 * value_columns * step_bytes;
    tiled = layer.block_size % kSubTile == 0;
    head_bytes = tiled ? int64_t(layer.block_size / kSubTile) * (key_bytes + value_bytes)
                       : int64_t(layer.block_size) * (layer.key_size + layer.value_size) * element_bytes;
  }

  // Where in a step element `index` (0..15) of the pair's `half` (0 or 1) lies.
  static int in_step(int32_t element, int half, int index) {
    return element == kBfloat16 ? 2 * index + half : 16 * half + index;
  }
};

}  // namespace KILBURN_ISA
