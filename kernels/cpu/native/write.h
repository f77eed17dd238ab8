// Writing K and V of a step's rows into their slots.
#pragma once

#include "lanes.h"
#include "layout.h"

namespace KILBURN_ISA {

// Put one token's K and V of one KV head, as element t of a sub-tile. Both sources are rows of elements side by side; the padding
// becomes zeros. `keys` is the sub-tile's K, `value_row` its steps of V for the pair that the token belongs to.
template <Element E>
ALWAYS_INLINE void put_token(const Layer& layer, const Layout& layout, const char* key, const char* value, int t, char* keys,
                             char* value_row) {
  constexpr int kSize = kBytes<E>;
  const int key_pairs = layer.key_size / 2;
  if constexpr (E == kBfloat16) {
    for (int pair = 0; pair < key_pairs; pair++) memcpy(keys + pair * layout.step_bytes + 4 * t, key + 4 * pair, 4);
  } else {
    for (int pair = 0; pair < key_pairs; pair++) {
      char* step = keys + pair * layout.step_bytes + kSize * t;
      memcpy(step, key + 2 * kSize * pair, kSize);
      memcpy(step + 16 * kSize, key + 2 * kSize * pair + kSize, kSize);
    }
  }
  if (layer.key_size % 2) {
    char* step = keys + key_pairs * layout.step_bytes;
    memcpy(step + Layout::in_step(E, 0, t) * kSize, key + 2 * kSize * key_pairs, kSize);
    memset(step + Layout::in_step(E, 1, t) * kSize, 0, kSize);
  }
  const int half = t % 2;
  for (int column = 0; column < layout.value_columns; column++) {
    char* step = value_row + column * layout.step_bytes + Layout::in_step(E, half, 0) * kSize;
    const int left = layer.value_size - 16 * column, count = left < 16 ? left : 16;
    const char* from = value + 16 * kSize * column;
    if constexpr (E == kBfloat16) {
      for (int d = 0; d < count; d++) memcpy(step + 4 * d, from + 2 * d, 2);
      for (int d = count; d < 16; d++) memset(step + 4 * d, 0, 2);
    } else {
      memcpy(step, from, static_cast<size_t>(count) * kSize);
      memset(step + count * kSize, 0, static_cast<size_t>(16 - count) * kSize);
    }
  }
}

template <Element E>
void write_rows(const WriteCall& call, int thread, int threads) {
  const Layer& layer = call.layer;
  const Layout layout(layer);
  constexpr int kSize = kBytes<E>;
  const int64_t items = int64_t(call.rows.rows) * layer.kv_heads;
  const int64_t end = items * (thread + 1) / threads;
  for (int64_t item = items * thread / threads; item < end; item++) {
    const int64_t row = item / layer.kv_heads, head = item - row * layer.kv_heads;
    const int64_t slot = call.rows.write_slots[row], block = slot / layer.block_size;
    const int offset = static_cast<int>(slot - block * layer.block_size);
    const char* key = call.keys.data + row * call.keys.row_stride + head * call.keys.head_stride;
    const char* value = call.values.data + row * call.values.row_stride + head * call.values.head_stride;
    char* to = layer.base + block * layer.frame_stride + head * layout.head_bytes;
    if (layout.tiled) {
      char* keys = to + int64_t(offset / kSubTile) * (layout.key_bytes + layout.value_bytes);
      const int t = offset % kSubTile;
      put_token<E>(layer, layout, key, value, t, keys, keys + layout.key_bytes + t / 2 * layout.value_columns * layout.step_bytes);
    } else {
      memcpy(to + int64_t(offset) * layer.key_size * kSize, key, static_cast<size_t>(layer.key_size) * kSize);
      to += int64_t(layer.block_size) * layer.key_size * kSize;
      memcpy(to + int64_t(offset) * layer.value_size * kSize, value, static_cast<size_t>(layer.value_size) * kSize);
    }
  }
}

}  // namespace KILBURN_ISA
