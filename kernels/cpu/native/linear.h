// Rows times a weight: output[row] = weight input[row] + bias, for few rows at the speed at which the weight is read.
//
// The weight is packed in blocks of 32 outputs: for each pair of the inner dimension a step (steps.h) of the first sixteen, then one of
// the others. So a load has sixteen outputs in its lanes, no sums across lanes are needed, and a thread goes through one piece of
// memory from its beginning to its end. Missing outputs, and the second of a pair that is none, are zeros. Each output of a row adds up
// in the same order however many rows and threads there are: a row's result does not depend on its company.
#pragma once

#include "steps.h"

namespace KILBURN_ISA {

// Two elements of an input's row, each in all lanes.
template <Element E>
struct Factor {
  Lanes first, second;

  static ALWAYS_INLINE Factor of(const char* p) {
    if constexpr (E == kFloat32) {
      const float* f = reinterpret_cast<const float*>(p);
      return {all(f[0]), all(f[1])};
    }
    uint32_t both;
    memcpy(&both, p, sizeof both);
    const uint32_t low = both << 16, high = both & 0xffff0000u;
    float f[2];
    memcpy(&f[0], &low, sizeof low);
    memcpy(&f[1], &high, sizeof high);
    return {all(f[0]), all(f[1])};
  }
  ALWAYS_INLINE Lanes times(const Step<E>& step, Lanes sum) const { return fma(step.second, second, fma(step.first, first, sum)); }
};

#ifdef __AVX512BF16__
template <>
struct Factor<kBfloat16> {
  __m512i both;

  static ALWAYS_INLINE Factor of(const char* p) {
    int bits;
    memcpy(&bits, p, sizeof bits);
    return {_mm512_set1_epi32(bits)};
  }
  ALWAYS_INLINE Lanes times(const Step<kBfloat16>& step, Lanes sum) const {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(step.bits), reinterpret_cast<__m512bh>(both))};
  }
};
#endif

constexpr int kBlockOutputs = 32;
constexpr int kBlockSteps = kBlockOutputs / 16;  // for each pair of the inner dimension

#ifdef __AVX512F__
constexpr int kRowsTogether = 8;   // 8 x 2 sums, of 32 registers
constexpr int kStepsTogether = 2;  // of the two
#else
constexpr int kRowsTogether = 4;  // 4 x 1 sums of two registers each, of 16
constexpr int kStepsTogether = 1;
#endif

// How far ahead of its use the weight is fetched. Measured: at 2 KiB eight rows run at three quarters of the speed, at 8 KiB one row at
// nine tenths.
template <int kRows>
constexpr int kAheadBytes = kRows <= 2 ? 2048 : 8192;

// kRows rows from `row` on, 16 * kStepsTogether outputs of a block from step `part` on. With kAhead the weight is fetched ahead: for
// the first rows to come, the others find it in the cache.
template <Element E, int kRows, bool kAhead>
__attribute__((noinline)) void multiply(const LinearCall& call, int row, int64_t block, int part) {
  constexpr int kSize = kBytes<E>, kStepBytes = 32 * kSize, kStride = kBlockSteps * kStepBytes;
  const int pairs = call.inner / 2, steps = (call.inner + 1) / 2;
  const char* weight = call.weight + block * steps * kStride + part * kStepBytes;
  const char* input = call.input + row * call.input_stride;
  Lanes sums[kRows][kStepsTogether];
  for (auto& own : sums)
    for (auto& sum : own) sum = zero();
#pragma GCC unroll 2
  for (int pair = 0; pair < pairs; pair++, weight += kStride) {
    Step<E> step[kStepsTogether];
    for (int wide = 0; wide < kStepsTogether; wide++) step[wide] = Step<E>::load(weight + wide * kStepBytes);
    if constexpr (kAhead)
      for (int wide = 0; wide < kStepsTogether; wide++) fetch<E>(weight + wide * kStepBytes + kAheadBytes<kRows>);
    for (int i = 0; i < kRows; i++) {
      const Factor<E> factor = Factor<E>::of(input + i * call.input_stride + 2 * kSize * pair);
      for (int wide = 0; wide < kStepsTogether; wide++) sums[i][wide] = factor.times(step[wide], sums[i][wide]);
    }
  }
  if (pairs < steps) {
    for (int i = 0; i < kRows; i++) {
      char last[2 * kSize] = {};
      memcpy(last, input + i * call.input_stride + 2 * kSize * pairs, kSize);
      for (int wide = 0; wide < kStepsTogether; wide++)
        sums[i][wide] = Factor<E>::of(last).times(Step<E>::load(weight + wide * kStepBytes), sums[i][wide]);
    }
  }
  for (int wide = 0; wide < kStepsTogether; wide++) {
    const int64_t first = block * kBlockOutputs + 16 * (part + wide), left = call.outputs - first;
    if (left <= 0) break;
    const int count = left < 16 ? static_cast<int>(left) : 16;
    const Lanes bias = call.bias ? load_elements<E>(call.bias + first * kSize, count) : zero();
    for (int i = 0; i < kRows; i++) {
      const int64_t at = static_cast<int64_t>(row + i) * call.outputs + first;
      if (call.wide)
        store_elements<kFloat32>(call.output + at * kBytes<kFloat32>, sums[i][wide] + bias, count);
      else
        store_elements<E>(call.output + at * kSize, sums[i][wide] + bias, count);
    }
  }
}

template <Element E, bool kAhead, int kRows>
ALWAYS_INLINE void multiply_rows(int count, const LinearCall& call, int row, int64_t block, int part) {
  if (count == kRows) return multiply<E, kRows, kAhead>(call, row, block, part);
  if constexpr (kRows > 1) multiply_rows<E, kAhead, kRows - 1>(count, call, row, block, part);
}

// All rows, as many together as registers hold, in groups of like size.
template <Element E>
void multiply_block(const LinearCall& call, int64_t block) {
  const int64_t rows = call.rows, groups = (rows + kRowsTogether - 1) / kRowsTogether;
  for (int part = 0; part < kBlockSteps; part += kStepsTogether) {
    for (int64_t group = 0; group < groups; group++) {
      const int from = static_cast<int>(rows * group / groups), count = static_cast<int>(rows * (group + 1) / groups) - from;
      if (part == 0 && group == 0)
        multiply_rows<E, true, kRowsTogether>(count, call, from, block, part);
      else
        multiply_rows<E, false, kRowsTogether>(count, call, from, block, part);
    }
  }
}

template <Element E>
void linear(const LinearCall& call, int thread, int threads) {
  const int64_t blocks = (static_cast<int64_t>(call.outputs) + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t end = blocks * (thread + 1) / threads;
  for (int64_t block = blocks * thread / threads; block < end; block++) multiply_block<E>(call, block);
}

}  // namespace KILBURN_ISA
