// What a model does between its products: norms, the gate of its feed-forward part. And a plain read, the limit of them all.
//
// Each value is rounded to the element's type where transformers' modules round it. Reading NaN or infinity is no special case.
#pragma once

#include "lanes.h"

namespace KILBURN_ISA {

// ------------------------------------------------------------------------------------------------------------- RMS norm

// One row: sum = input + residual, if there is one; then weight * rounded(sum / sqrt(mean of squares + epsilon)).
template <Element E>
ALWAYS_INLINE void norm_row(const NormCall& call, int64_t row) {
  constexpr int kSize = kBytes<E>;
  const char* input = call.input + row / call.heads * call.input_stride + row % call.heads * call.head_stride;
  const char* residual = call.residual ? call.residual + row * call.residual_stride : nullptr;
  char* sum = call.residual ? call.sum + row * call.size * kSize : nullptr;
  char* output = call.output + row * call.size * kSize;
  Lanes squares = zero();
  for (int i = 0; i < call.size; i += 16) {
    const int64_t at = static_cast<int64_t>(i) * kSize;
    const int left = call.size - i;
    Lanes x = load_elements<E>(input + at, left);
    if (residual) {
      x = rounded<E>(x + load_elements<E>(residual + at, left));
      store_elements<E>(sum + at, x, left);
    }
    squares = fma(x, x, squares);
  }
  const float mean = sum_of(squares) / static_cast<float>(call.size);
  const Lanes scale = all(1.0f / __builtin_sqrtf(mean + call.epsilon));
  const char* from = residual ? sum : input;
  for (int i = 0; i < call.size; i += 16) {
    const int64_t at = static_cast<int64_t>(i) * kSize;
    const int left = call.size - i;
    const Lanes x = rounded<E>(load_elements<E>(from + at, left) * scale);
    store_elements<E>(output + at, load_elements<E>(call.weight + at, left) * x, left);
  }
}

template <Element E>
void rms_norm(const NormCall& call, int thread, int threads) {
  const int64_t rows = static_cast<int64_t>(call.rows) * call.heads, end = rows * (thread + 1) / threads;
  for (int64_t row = rows * thread / threads; row < end; row++) norm_row<E>(call, row);
}

// ----------------------------------------------------------------------------------------------------------------- gate

// x / (1 + e^-x), by e^-|x|, which never overflows. Minus infinity becomes NaN, as it does in torch.
ALWAYS_INLINE Lanes silu(Lanes x) {
  constexpr float kOneOverLn2 = 1.442695040888963f;
  const Lanes small = exp2(zero() - magnitude(x) * all(kOneOverLn2));
  return x * (where_less(x, zero(), small, all(1.0f)) / (all(1.0f) + small));
}

constexpr int kGateColumns = 256;  // that one thread takes at once

template <Element E>
void silu_mul(const GateCall& call, int thread, int threads) {
  constexpr int kSize = kBytes<E>;
  const int64_t cuts = (call.size + kGateColumns - 1) / kGateColumns, items = cuts * call.rows;
  const int64_t end = items * (thread + 1) / threads;
  for (int64_t item = items * thread / threads; item < end; item++) {
    const int64_t row = item / cuts;
    const int first = static_cast<int>(item - row * cuts) * kGateColumns;
    const int last = call.size - first < kGateColumns ? call.size : first + kGateColumns;
    const char* gate = call.input + row * call.input_stride;
    const char* up = gate + static_cast<int64_t>(call.size) * kSize;
    char* output = call.output + row * call.size * kSize;
    for (int i = first; i < last; i += 16) {
      const int64_t at = static_cast<int64_t>(i) * kSize;
      const int left = last - i;
      const Lanes gated = rounded<E>(silu(load_elements<E>(gate + at, left)));
      store_elements<E>(output + at, gated * load_elements<E>(up + at, left), left);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- peaks

constexpr int kPeakBlock = 1024;  // that is looked at a second time, for where the largest element lies

// The largest element of a block; NaN if there is one.
ALWAYS_INLINE float peak_of(const float* block, int count) {
  constexpr int kChains = 4;
  const float lowest = -__builtin_inff();
  Lanes tops[kChains] = {all(lowest), all(lowest), all(lowest), all(lowest)}, nan = zero();
  int i = 0;
  for (; i + 16 * kChains <= count; i += 16 * kChains) {
    for (int chain = 0; chain < kChains; chain++) {
      const Lanes x = load(block + i + 16 * chain);
      tops[chain] = max(tops[chain], x);
      nan = where_nan(x, nan);
    }
  }
  for (; i < count; i += 16) {
    const int left = count - i;
    Lanes x = load_elements<kFloat32>(reinterpret_cast<const char*>(block + i), left);
    if (left < 16) x = where_within(0, left, x, all(lowest));
    tops[0] = max(tops[0], x);
    nan = where_nan(x, nan);
  }
  const float found = sum_of(nan);
  return found == found ? max_of(max(max(tops[0], tops[1]), max(tops[2], tops[3]))) : found;
}

inline void peaks(const PeaksCall& call, int thread, int threads) {
  const int end = static_cast<int>(static_cast<int64_t>(call.rows) * (thread + 1) / threads);
  for (int row = static_cast<int>(static_cast<int64_t>(call.rows) * thread / threads); row < end; row++) {
    const auto* elements = reinterpret_cast<const float*>(call.input + row * call.input_stride);
    float best = -__builtin_inff();
    int begin = 0;
    for (int at = 0; at < call.size; at += kPeakBlock) {
      const float top = peak_of(elements + at, call.size - at < kPeakBlock ? call.size - at : kPeakBlock);
      if (top <= best) continue;
      best = top;
      begin = at;
      if (top != top) break;
    }
    int index = begin;
    if (best == best)
      while (elements[index] != best) index++;
    call.maxima[row] = best;
    call.indexes[row] = index;
  }
}

// ----------------------------------------------------------------------------------------------------------------- read

// The exclusive or of one thread's share of the 64-byte words, and of what is left behind the last, which is the last thread's.
inline uint64_t read(const char* memory, int64_t bytes, int thread, int threads) {
  typedef uint64_t Word __attribute__((vector_size(64)));
  constexpr int kChains = 4;
  const auto add = [memory](Word& to, int64_t index) {
    Word word;
    memcpy(&word, memory + 64 * index, sizeof word);
    to ^= word;
  };
  const int64_t count = bytes / 64, end = count * (thread + 1) / threads;
  Word found[kChains] = {};
  int64_t i = count * thread / threads;
  for (; i + kChains <= end; i += kChains)
    for (int chain = 0; chain < kChains; chain++) add(found[chain], i + chain);
  for (; i < end; i++) add(found[0], i);
  uint64_t all_of_it = 0;
  for (int lane = 0; lane < 8; lane++)
    for (int chain = 0; chain < kChains; chain++) all_of_it ^= found[chain][lane];
  if (thread == threads - 1)
    for (int64_t at = 64 * count; at < bytes; at++)
      all_of_it ^= static_cast<uint64_t>(static_cast<unsigned char>(memory[at])) << at % 8 * 8;
  return all_of_it;
}

}  // namespace KILBURN_ISA
