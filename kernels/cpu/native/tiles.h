// Where the tokens of a tile lie: found through the block table, put together where blocks are no whole sub-tiles.
#pragma once

#include "lanes.h"
#include "layout.h"
#include "write.h"

namespace KILBURN_ISA {

constexpr int kTile = 64;  // tokens of one KV head that are worked on together
constexpr int kSubTiles = kTile / kSubTile;
constexpr int kPairs = kTile / 2;

struct Tile {
  int first;                   // position of the first token
  int sub_begin, sub_end;      // sub-tiles that somebody sees
  int pair_begin, pair_end;    // pairs of tokens that somebody sees
  const char* keys[kSubTiles];  // those that nobody sees repeat one that somebody does
  const char* values[kPairs];   // steps of V of each pair, from pair_begin to pair_end
};

// K of sub-tile `sub` of a sequence's KV head, where blocks are whole sub-tiles; its V lies behind.
ALWAYS_INLINE const char* sub_tile(const Layer& layer, const Layout& layout, const int32_t* table, int head, unsigned sub) {
  const unsigned per_block = static_cast<unsigned>(layer.block_size) / kSubTile;
  const unsigned entry = sub / per_block, within = sub - entry * per_block;
  return layer.base + table[entry] * layer.frame_stride + head * layout.head_bytes +
         static_cast<int64_t>(within) * (layout.key_bytes + layout.value_bytes);
}

// Put 16 tokens together as a sub-tile; tokens outside of begin .. end - 1 become zeros in V and stay what they are in K.
template <Element E>
__attribute__((noinline)) void stage(const Layer& layer, const Layout& layout, const int32_t* table, int head, int first, int begin,
                                     int end, char* to) {
  constexpr int kSize = kBytes<E>;
  for (int t = 0; t < kSubTile; t++) {
    const int position = first + t;
    char* value_row = to + layout.key_bytes + (t / 2) * layout.value_columns * layout.step_bytes;
    if (position < begin || position >= end) {
      for (int d = 0; d < layout.value_columns * 16; d++)
        memset(value_row + d / 16 * layout.step_bytes + Layout::in_step(E, t & 1, d % 16) * kSize, 0, kSize);
      continue;
    }
    const int block = position / layer.block_size, offset = position - block * layer.block_size;
    const char* from = layer.base + table[block] * layer.frame_stride + head * layout.head_bytes;
    const char* key = from + int64_t(offset) * layer.key_size * kSize;
    const char* value = from + (int64_t(layer.block_size) * layer.key_size + int64_t(offset) * layer.value_size) * kSize;
    put_token<E>(layer, layout, key, value, t, to, value_row);
  }
}

// Memory for what has to be put together.
struct Scratch {
  char* staged;     // kSubTiles sub-tiles
  char* beside[2];  // a pair's V, at the beginning and at the end of what is seen
};

// A pair's V with zeros in place of one of its two tokens.
template <Element E>
__attribute__((noinline)) const char* without(const Layout& layout, const char* row, int half, char* to) {
  constexpr int kSize = kBytes<E>;
  memcpy(to, row, static_cast<size_t>(layout.value_columns) * layout.step_bytes);
  for (int d = 0; d < layout.value_columns * 16; d++)
    memset(to + d / 16 * layout.step_bytes + Layout::in_step(E, half, d % 16) * kSize, 0, kSize);
  return to;
}

// The tile at 64 * number, of which somebody sees begin .. end - 1 (positions; not empty).
template <Element E>
ALWAYS_INLINE void find_tile(const Layer& layer, const Layout& layout, const int32_t* table, int head, int number, int begin, int end,
                             const Scratch& scratch, Tile& tile) {
  tile.first = number * kTile;
  const int low = begin > tile.first ? begin - tile.first : 0;
  const int high = end < tile.first + kTile ? end - tile.first : kTile;
  tile.sub_begin = low / kSubTile;
  tile.sub_end = (high + kSubTile - 1) / kSubTile;
  tile.pair_begin = low / 2;
  tile.pair_end = (high + 1) / 2;
  for (int sub = tile.sub_begin; sub < tile.sub_end; sub++) {
    if (layout.tiled) {
      tile.keys[sub] = sub_tile(layer, layout, table, head, static_cast<unsigned>(number * kSubTiles + sub));
    } else {
      char* to = scratch.staged + sub * int64_t(layout.key_bytes + layout.value_bytes);
      stage<E>(layer, layout, table, head, tile.first + sub * kSubTile, begin, end, to);
      tile.keys[sub] = to;
    }
  }
  for (int sub = 0; sub < tile.sub_begin; sub++) tile.keys[sub] = tile.keys[tile.sub_begin];
  for (int sub = tile.sub_end; sub < kSubTiles; sub++) tile.keys[sub] = tile.keys[tile.sub_end - 1];
  const int row_bytes = layout.value_columns * layout.step_bytes;
  for (int sub = tile.sub_begin; sub < tile.sub_end; sub++)
    for (int pair = 0; pair < kSubTile / 2; pair++)
      tile.values[sub * (kSubTile / 2) + pair] = tile.keys[sub] + layout.key_bytes + pair * row_bytes;
  if (low % 2) tile.values[tile.pair_begin] = without<E>(layout, tile.values[tile.pair_begin], 0, scratch.beside[0]);
  if (high % 2) tile.values[tile.pair_end - 1] = without<E>(layout, tile.values[tile.pair_end - 1], 1, scratch.beside[1]);
}

}  // namespace KILBURN_ISA
