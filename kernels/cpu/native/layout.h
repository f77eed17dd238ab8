// How a frame lies: for each layer, for each KV head, the K and V of the block's tokens.
//
// What the vector kernels read are *sub-tiles*: 16 tokens of one KV head, in *steps* of 32 elements (64 bytes in 16-bit dtypes):
//
//   K: one step for each pair of dimensions (d, d + 1):    2 dimensions x 16 tokens, step d / 2
//   V: one step for each pair of tokens and 16 dimensions: 2 tokens x 16 dimensions, step (t / 2) * (size / 16) + d / 16
//
// so that one load of K has 16 tokens in its lanes and one load of V has 16 dimensions: neither needs sums across lanes.
// Inside a step bfloat16 has the members of a pair side by side ([16][2], what dot products of pairs read), the others apart ([2][16]).
// Sizes are padded: K to even, V to a multiple of 16. The padding is written as zeros. Most models' sizes need none.
//
// A block is one *record* after another, K, then V. A record is a sub-tile where the block size is a multiple of 16; else it is made in
// the same way of as many tokens as a power of two divides the block size (its *width*, of 24 tokens 8), so that no frame holds
// slots for more tokens than its block has. The kernels put such K together to sub-tiles; V can stay where it is, unless the width is 1.
#pragma once

#include "abi.h"

// In the namespace too: no copy of it that was compiled for a newer instruction set may be taken for an older one.
namespace KILBURN_ISA {

constexpr int kSubTile = 16;
constexpr int kStepElements = 32;

// What one thread needs for a row of a DrawCall: four arrays of as many float32 as it has elements, each of whole vectors.
inline int64_t draw_room_bytes(int size) { return 4 * ((static_cast<int64_t>(size) + 15) / 16 * 64); }

struct Layout {
  int element_bytes;
  int width;           // tokens of one record
  int step_bytes;      // of a sub-tile
  int key_steps;       // of K
  int value_columns;   // of 16 dimensions: steps of V for one pair of tokens
  int key_bytes;       // of one record's K
  int value_bytes;     // of one record's V
  int row_bytes;       // of V for one pair of tokens
  int64_t head_bytes;  // of one KV head in one block

  explicit Layout(const Layer& layer) {
    element_bytes = layer.element == kFloat32 ? 4 : 2;
    const int power = layer.block_size & -layer.block_size;
    width = power < kSubTile ? power : kSubTile;
    step_bytes = kStepElements * element_bytes;
    key_steps = (layer.key_size + 1) / 2;
    value_columns = (layer.value_size + 15) / 16;
    key_bytes = key_steps * 2 * width * element_bytes;
    value_bytes = value_columns * 16 * width * element_bytes;
    row_bytes = value_columns * step_bytes;
    head_bytes = int64_t(layer.block_size / width) * (key_bytes + value_bytes);
  }

  int record_bytes() const { return key_bytes + value_bytes; }

  // Where in a step `length` long (16, or a record's width) element `index` of the pair's `half` (0 or 1) lies.
  static int in_step(int32_t element, int half, int index, int length = 16) {
    return element == kBfloat16 ? 2 * index + half : length * half + index;
  }
};

}  // namespace KILBURN_ISA
