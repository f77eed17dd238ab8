// Writing K and V of a step's rows into their slots.
#pragma once

#include "lanes.h"
#include "layout.h"

namespace KILBURN_ISA {

// Put one token's K and V of one KV head at its place in a record. Both sources are elements side by side; the padding becomes zeros.
template <Element E>
ALWAYS_INLINE void put_token(const Layer& layer, const Layout& layout, const char* key, const char* value, int t, char* record) {
  constexpr int kSize = kBytes<E>;
  const int width = layout.width, key_pairs = layer.key_size / 2, step_bytes = 2 * width * kSize;
  if constexpr (E == kBfloat16) {
    for (int pair = 0; pair < key_pairs; pair++) memcpy(record + pair * step_bytes + 4 * t, key + 4 * pair, 4);
  } else {
    for (int pair = 0; pair < key_pairs; pair++) {
      char* step = record + pair * step_bytes + kSize * t;
      memcpy(step, key + 2 * kSize * pair, kSize);
      memcpy(step + width * kSize, key + 2 * kSize * pair + kSize, kSize);
    }
  }
  if (layer.key_size % 2) {
    char* step = record + key_pairs * step_bytes;
    memcpy(step + Layout::in_step(E, 0, t, width) * kSize, key + 2 * kSize * key_pairs, kSize);
    memset(step + Layout::in_step(E, 1, t, width) * kSize, 0, kSize);
  }
  char* row = record + layout.key_bytes;
  if (width == 1) {
    const int bytes = layer.value_size * kSize;
    memcpy(row, value, static_cast<size_t>(bytes));
    memset(row + bytes, 0, static_cast<size_t>(layout.value_bytes - bytes));
    return;
  }
  row += t / 2 * layout.row_bytes;
  for (int column = 0; column < layout.value_columns; column++) {
    char* step = row + column * layout.step_bytes + Layout::in_step(E, t % 2, 0) * kSize;
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

// The record of a token of one KV head.
ALWAYS_INLINE char* record_of(const Layer& layer, const Layout& layout, int64_t block, int offset, int head) {
  return layer.base + block * layer.frame_stride + head * layout.head_bytes + int64_t(offset / layout.width) * layout.record_bytes();
}

// K and V of one row and KV head into the row's slot; K from `key`.
template <Element E>
ALWAYS_INLINE void write_token(const WriteCall& call, const Layout& layout, int64_t row, int head, const char* key) {
  const Layer& layer = call.layer;
  const int64_t slot = call.rows.write_slots[row], block = slot / layer.block_size;
  const int offset = static_cast<int>(slot - block * layer.block_size);
  const char* value = call.values.data + row * call.values.row_stride + head * call.values.head_stride;
  put_token<E>(layer, layout, key, value, offset % layout.width, record_of(layer, layout, block, offset, head));
}

template <Element E>
void write_rows(const WriteCall& call, int thread, int threads) {
  const Layer& layer = call.layer;
  const Layout layout(layer);
  const int64_t items = int64_t(call.rows.rows) * layer.kv_heads, end = items * (thread + 1) / threads;
  for (int64_t item = items * thread / threads; item < end; item++) {
    const int64_t row = item / layer.kv_heads;
    const int head = static_cast<int>(item - row * layer.kv_heads);
    write_token<E>(call, layout, row, head, call.keys.data + row * call.keys.row_stride + head * call.keys.head_stride);
  }
}

}  // namespace KILBURN_ISA
