// Where the tokens of a tile lie: found through the block table, put together where records are no whole sub-tiles.
#pragma once

#include "lanes.h"
#include "layout.h"
#include "write.h"

namespace KILBURN_ISA {

constexpr int kTile = 128;  // tokens of one KV head that are worked on together
constexpr int kSubTiles = kTile / kSubTile;
constexpr int kPairs = kTile / 2;

// A tile of a sequence's KV head: its tokens 128 * number .. 128 * number + 127, as far as they are of begin .. end - 1, which is
// what somebody sees of the whole sequence. Nothing else is looked at, nor are table entries for it.
struct Where {
  const int32_t* table;
  int head;
  int number;
  int begin, end;

  int low() const { return begin > number * kTile ? begin - number * kTile : 0; }  // in the tile
  int high() const { return end < number * kTile + kTile ? end - number * kTile : kTile; }
};

struct Tile {
  int first;                    // position of the first token
  int sub_begin, sub_end;       // sub-tiles that somebody sees
  int pair_begin, pair_end;     // pairs of tokens that somebody sees
  const char* keys[kSubTiles];  // those that nobody sees repeat one that somebody does
  const char* values[kPairs];   // a row of V for each pair, from pair_begin to pair_end
};

// Memory for what has to be put together.
struct Scratch {
  char* keys;       // K of kSubTiles sub-tiles
  char* values;     // V of kPairs pairs
  char* beside[2];  // V of a pair, at the beginning and at the end of what is seen
};

// K of sub-tile `sub` of a sequence's KV head, where records are sub-tiles.
ALWAYS_INLINE const char* sub_tile(const Layer& layer, const Layout& layout, const int32_t* table, int head, unsigned sub) {
  const unsigned per_block = static_cast<unsigned>(layer.block_size) / kSubTile;
  const unsigned entry = sub / per_block, within = sub - entry * per_block;
  return layer.base + table[entry] * layer.frame_stride + head * layout.head_bytes +
         static_cast<int64_t>(within) * layout.record_bytes();
}

// The record of one token, found through the table.
ALWAYS_INLINE const char* find_record(const Layer& layer, const Layout& layout, const Where& where, int position) {
  const int entry = position / layer.block_size;
  return record_of(layer, layout, where.table[entry], position - entry * layer.block_size, where.head);
}

// V of a pair with zeros in place of one of its two tokens.
template <Element E>
__attribute__((noinline)) const char* without(const Layout& layout, const char* row, int half, char* to) {
  constexpr int kSize = kBytes<E>;
  memcpy(to, row, static_cast<size_t>(layout.row_bytes));
  for (int d = 0; d < layout.value_columns * 16; d++)
    memset(to + d / 16 * layout.step_bytes + Layout::in_step(E, half, d % 16) * kSize, 0, kSize);
  return to;
}

// Copy one record's K into its place in a sub-tile, in pieces: a step of a record is one where pairs lie side by side, else two.
template <int kPiece, int kPieces>
ALWAYS_INLINE void spread(const char* record, char* to, int steps, int piece_stride, int step_bytes) {
  for (int step = 0; step < steps; step++)
    for (int piece = 0; piece < kPieces; piece++, record += kPiece) memcpy(to + step * step_bytes + piece * piece_stride, record, kPiece);
}

template <Element E>
ALWAYS_INLINE void put_keys(const Layout& layout, const char* record, int t, char* sub) {
  constexpr int kPieces = E == kBfloat16 ? 1 : 2, kToken = E == kBfloat16 ? 4 : kBytes<E>;
  const int steps = layout.key_steps, stride = 16 * layout.element_bytes, step_bytes = layout.step_bytes;
  char* to = sub + t * kToken;
  switch (layout.width) {
    case 1: return spread<kToken, kPieces>(record, to, steps, stride, step_bytes);
    case 2: return spread<2 * kToken, kPieces>(record, to, steps, stride, step_bytes);
    case 4: return spread<4 * kToken, kPieces>(record, to, steps, stride, step_bytes);
    default: return spread<8 * kToken, kPieces>(record, to, steps, stride, step_bytes);
  }
}

// V of two tokens whose records have only themselves, as a pair's row; zeros where one of them is null.
template <Element E>
ALWAYS_INLINE void put_pair(const Layout& layout, const char* first, const char* second, char* row) {
  constexpr int kHalf = 16 * kBytes<E>;
  alignas(64) static const char kZeros[kHalf] = {};
  for (int column = 0; column < layout.value_columns; column++, row += layout.step_bytes) {
    const char* a = first ? first + column * kHalf : kZeros;
    const char* b = second ? second + column * kHalf : kZeros;
    if constexpr (E == kBfloat16) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
      const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
      const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 32), _mm256_permute2x128_si256(low, high, 0x31));
    } else {
      memcpy(row, a, kHalf);
      memcpy(row + kHalf, b, kHalf);
    }
  }
}

// Have the record of a token fetched into the second cache level.
ALWAYS_INLINE void fetch_record(const Layer& layer, const Layout& layout, const Where& where, int position) {
  const char* record = find_record(layer, layout, where, position);
  for (int at = 0; at < layout.record_bytes(); at += 64) _mm_prefetch(record + at, _MM_HINT_T1);
}

// Records are narrower than sub-tiles: put K together, and V where a record has one token. `next` is fetched meanwhile.
template <Element E>
__attribute__((noinline)) void gather_tile(const Layer& layer, const Layout& layout, const Where& where, const Where* next,
                                           const Scratch& scratch, Tile& tile) {
  const int width = layout.width, key_bytes = layout.key_steps * layout.step_bytes, low = where.low(), high = where.high();
  for (int sub = tile.sub_begin; sub < tile.sub_end; sub++) tile.keys[sub] = scratch.keys + int64_t(sub) * key_bytes;
  const char* before = nullptr;  // the record of the token before this one
  for (int t = low / width * width; t < high; t += width) {
    const char* record = find_record(layer, layout, where, tile.first + t);
    const char* values = record + layout.key_bytes;
    put_keys<E>(layout, record, t % kSubTile, scratch.keys + int64_t(t / kSubTile) * key_bytes);
    if (width > 1) {
      for (int pair = 0; pair < width / 2; pair++) tile.values[t / 2 + pair] = values + pair * layout.row_bytes;
    } else if (t % 2 || t + 1 == high) {
      char* row = scratch.values + int64_t(t / 2) * layout.row_bytes;
      put_pair<E>(layout, t % 2 ? before : values, t % 2 ? values : nullptr, row);
      tile.values[t / 2] = row;
    }
    before = values;
    const int ahead = next ? next->number * kTile + t : 0;
    if (next && ahead >= next->begin && ahead < next->end) fetch_record(layer, layout, *next, ahead);
  }
}

// Find a tile of which somebody sees something. `next`, where there is one, is fetched meanwhile if anything has to be moved.
template <Element E>
ALWAYS_INLINE void find_tile(const Layer& layer, const Layout& layout, const Where& where, const Where* next, const Scratch& scratch,
                             Tile& tile) {
  const int low = where.low(), high = where.high();
  tile.first = where.number * kTile;
  tile.sub_begin = low / kSubTile;
  tile.sub_end = (high + kSubTile - 1) / kSubTile;
  tile.pair_begin = low / 2;
  tile.pair_end = (high + 1) / 2;
  if (layout.width == kSubTile) {
    for (int sub = tile.sub_begin; sub < tile.sub_end; sub++) {
      tile.keys[sub] = sub_tile(layer, layout, where.table, where.head, static_cast<unsigned>(where.number * kSubTiles + sub));
      for (int pair = 0; pair < kSubTile / 2; pair++)
        tile.values[sub * (kSubTile / 2) + pair] = tile.keys[sub] + layout.key_bytes + pair * layout.row_bytes;
    }
  } else {
    gather_tile<E>(layer, layout, where, next, scratch, tile);
  }
  for (int sub = 0; sub < tile.sub_begin; sub++) tile.keys[sub] = tile.keys[tile.sub_begin];
  for (int sub = tile.sub_end; sub < kSubTiles; sub++) tile.keys[sub] = tile.keys[tile.sub_end - 1];
  if (layout.width == 1) return;  // pairs have been put together of what is seen
  if (low % 2) tile.values[tile.pair_begin] = without<E>(layout, tile.values[tile.pair_begin], 0, scratch.beside[0]);
  if (high % 2) tile.values[tile.pair_end - 1] = without<E>(layout, tile.values[tile.pair_end - 1], 1, scratch.beside[1]);
}

// The sub-tiles of a tile, where records are sub-tiles, to have them fetched; those that nobody sees repeat one that somebody does.
ALWAYS_INLINE void find_ahead(const Layer& layer, const Layout& layout, const Where& where, const char** to) {
  const int first = where.begin / kSubTile, last = (where.end - 1) / kSubTile;
  for (int sub = 0; sub < kSubTiles; sub++) {
    const int wanted = where.number * kSubTiles + sub, number = wanted < first ? first : wanted > last ? last : wanted;
    to[sub] = sub_tile(layer, layout, where.table, where.head, static_cast<unsigned>(number));
  }
}

}  // namespace KILBURN_ISA
