// Rotary position embedding of a step's queries and keys, fused with writing K and V: a key goes from its projection to its slot.
//
// Rounded as transformers' modules round: each product, then their sum or difference.
#pragma once

#include "write.h"

namespace KILBURN_ISA {

struct Pair {
  Lanes first, second;
};

template <Element E>
ALWAYS_INLINE Pair turn(Pair x, Lanes cosine, Lanes sine) {
  return {rounded<E>(x.first * cosine) - rounded<E>(x.second * sine), rounded<E>(x.second * cosine) + rounded<E>(x.first * sine)};
}

// Pairs (i, i + rotary / 2).
template <Element E>
ALWAYS_INLINE void turn_halves(const char* from, char* to, const char* cosines, const char* sines, int pairs) {
  constexpr int kSize = kBytes<E>;
  for (int i = 0; i < pairs; i += 16) {
    const int count = pairs - i, near = i * kSize, far = (i + pairs) * kSize;
    const Pair x = {load_elements<E>(from + near, count), load_elements<E>(from + far, count)};
    const Pair turned = turn<E>(x, load_elements<E>(cosines + near, count), load_elements<E>(sines + near, count));
    store_elements<E>(to + near, turned.first, count);
    store_elements<E>(to + far, turned.second, count);
  }
}

// Pairs (2 i, 2 i + 1).
template <Element E>
ALWAYS_INLINE void turn_neighbours(const char* from, char* to, const char* cosines, const char* sines, int pairs) {
  constexpr int kSize = kBytes<E>;
  for (int i = 0; i < pairs; i += 16) {
    const int count = pairs - i < 16 ? pairs - i : 16, low = 2 * count < 16 ? 2 * count : 16, high = 2 * count - low;
    alignas(64) float mixed[32], first[16], second[16];
    store(mixed, load_elements<E>(from + 2 * i * kSize, low));
    store(mixed + 16, load_elements<E>(from + (2 * i + 16) * kSize, high));
    for (int pair = 0; pair < 16; pair++) first[pair] = mixed[2 * pair], second[pair] = mixed[2 * pair + 1];
    const Pair x = {load(first), load(second)};
    const Pair turned =
        turn<E>(x, load_elements<E>(cosines + i * kSize, count), load_elements<E>(sines + i * kSize, count));
    store(first, turned.first);
    store(second, turned.second);
    for (int pair = 0; pair < 16; pair++) mixed[2 * pair] = first[pair], mixed[2 * pair + 1] = second[pair];
    store_elements<E>(to + 2 * i * kSize, load(mixed), low);
    store_elements<E>(to + (2 * i + 16) * kSize, load(mixed + 16), high);
  }
}

// One head of one row; what does not turn is copied.
template <Element E>
ALWAYS_INLINE void turn_head(const RotateCall& call, int64_t row, const char* from, char* to) {
  const char* cosines = call.cosines + row * call.cosine_stride;
  const char* sines = call.sines + row * call.sine_stride;
  const int pairs = call.rotary / 2, turned = 2 * pairs * kBytes<E>, bytes = call.write.layer.key_size * kBytes<E>;
  call.interleaved ? turn_neighbours<E>(from, to, cosines, sines, pairs) : turn_halves<E>(from, to, cosines, sines, pairs);
  memcpy(to + turned, from + turned, static_cast<size_t>(bytes - turned));
}

template <Element E>
void rotate_write(const RotateCall& call, int thread, int threads) {
  const WriteCall& write = call.write;
  const Layer& layer = write.layer;
  const Layout layout(layer);
  const int heads = call.q_heads + layer.kv_heads;
  const int64_t query_bytes = static_cast<int64_t>(layer.key_size) * kBytes<E>;
  const int64_t items = static_cast<int64_t>(write.rows.rows) * heads, end = items * (thread + 1) / threads;
  for (int64_t item = items * thread / threads; item < end; item++) {
    const int64_t row = item / heads;
    const int head = static_cast<int>(item - row * heads);
    if (head < call.q_heads) {
      const char* query = call.queries.data + row * call.queries.row_stride + head * call.queries.head_stride;
      turn_head<E>(call, row, query, call.turned + (row * call.q_heads + head) * query_bytes);
    } else {
      const int kv_head = head - call.q_heads;
      alignas(64) char key[kMaxTurned * kBytes<E>];
      turn_head<E>(call, row, write.keys.data + row * write.keys.row_stride + kv_head * write.keys.head_stride, key);
      write_token<E>(write, layout, row, kv_head, key);
    }
  }
}

}  // namespace KILBURN_ISA
