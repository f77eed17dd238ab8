// Few rows times a weight: output[row] = weight input[row] + bias, at the speed at which the weight is read.
//
// The lanes run along the weight's rows, which lie side by side as torch has them; sixteen outputs are finished together, by one sum
// over lanes for all of them. Each output of a row adds up in the same order however many rows and threads there are: a row's result
// does not depend on its company.
#pragma once

#include "lanes.h"

namespace KILBURN_ISA {

// What one load takes of a row of elements: 64 bytes. Behind the end of a row there are zeros.
template <Element E>
struct Piece;

template <>
struct Piece<kFloat32> {
  static constexpr int kElements = 16;
  Lanes values;

  static Piece at(const char* p) { return {load(reinterpret_cast<const float*>(p))}; }
  static Lanes add_product(Lanes sum, const Piece& a, const Piece& b) { return fma(a.values, b.values, sum); }
};

#ifdef __AVX512BF16__

template <>
struct Piece<kBfloat16> {
  static constexpr int kElements = 32;
  __m512bh pairs;

  static Piece at(const char* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
  static Lanes add_product(Lanes sum, const Piece& a, const Piece& b) { return {_mm512_dpbf16_ps(sum.v, a.pairs, b.pairs)}; }
};

#else

template <>
struct Piece<kBfloat16> {
  static constexpr int kElements = 32;
  Lanes low, high;  // the members of each pair

  static Piece at(const char* p) { return {low_bfloat16(p), high_bfloat16(p)}; }
  static Lanes add_product(Lanes sum, const Piece& a, const Piece& b) { return fma(a.high, b.high, fma(a.low, b.low, sum)); }
};

#endif

template <Element E>
ALWAYS_INLINE Piece<E> last_piece(const char* p, int count) {
  alignas(64) char whole[64] = {};
  memcpy(whole, p, static_cast<size_t>(count) * kBytes<E>);
  return Piece<E>::at(whole);
}

// Lane i of the result is the sum of the lanes of x[i].
#ifdef __AVX512F__
ALWAYS_INLINE Lanes sums_of(const Lanes (&x)[16]) {
  __m512 twos[8], fours[4], eights[2];
  for (int i = 0; i < 8; i++)  // in each quarter: a b a b of x[2i], x[2i + 1]
    twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  for (int i = 0; i < 4; i++)  // in each quarter: a b c d of x[4i] .. x[4i + 3]
    fours[i] = _mm512_add_ps(_mm512_shuffle_ps(twos[2 * i], twos[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(twos[2 * i], twos[2 * i + 1], 0xee));
  for (int i = 0; i < 2; i++)  // quarters: fours[2i] twice, fours[2i + 1] twice
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd))};
}
#else
ALWAYS_INLINE __m256 sums_of_eight(const Lanes* x) {
  __m256 ones[8], twos[4];
  for (int i = 0; i < 8; i++) ones[i] = _mm256_add_ps(x[i].low, x[i].high);
  for (int i = 0; i < 4; i++) twos[i] = _mm256_hadd_ps(ones[2 * i], ones[2 * i + 1]);
  const __m256 first = _mm256_hadd_ps(twos[0], twos[1]), last = _mm256_hadd_ps(twos[2], twos[3]);
  return _mm256_add_ps(_mm256_permute2f128_ps(first, last, 0x20), _mm256_permute2f128_ps(first, last, 0x31));
}
ALWAYS_INLINE Lanes sums_of(const Lanes (&x)[16]) { return {sums_of_eight(x), sums_of_eight(x + 8)}; }
#endif

// How the work is cut, found by measurement. Rows of the input that share each load of the weight: as many sums as registers hold.
#ifdef __AVX512F__
constexpr int kRowsTogether = 8;
#else
constexpr int kRowsTogether = 4;
#endif

// Rows of the weight that share each load of the input. Two need the memory told ahead, or the second of them is read too late.
template <int kRows>
constexpr int kWeightRows = kRowsTogether == 8 && kRows >= 3 ? 2 : 1;

// products[row][0 .. kWide - 1]: kRows rows of the input times kWide rows of the weight, not yet summed over lanes.
template <Element E, int kRows, int kWide>
ALWAYS_INLINE void multiply(const LinearCall& call, const char* input, const char* weight, Lanes (&products)[kRows][16], int column) {
  using Own = Piece<E>;
  Lanes sums[kRows][kWide];
  for (int row = 0; row < kRows; row++)
    for (int wide = 0; wide < kWide; wide++) sums[row][wide] = zero();
  const int whole = call.inner - call.inner % Own::kElements;
  for (int i = 0; i < whole; i += Own::kElements) {
    const int64_t at = static_cast<int64_t>(i) * kBytes<E>;
    Own weights[kWide];
    for (int wide = 0; wide < kWide; wide++) weights[wide] = Own::at(weight + wide * call.weight_stride + at);
    if constexpr (kWide > 1)  // the same place in the rows that come next
      for (int wide = 0; wide < kWide; wide++) _mm_prefetch(weight + (kWide + wide) * call.weight_stride + at, _MM_HINT_T1);
    for (int row = 0; row < kRows; row++) {
      const Own own = Own::at(input + row * call.input_stride + at);
      for (int wide = 0; wide < kWide; wide++) sums[row][wide] = Own::add_product(sums[row][wide], weights[wide], own);
    }
  }
  if (whole < call.inner) {
    const int64_t at = static_cast<int64_t>(whole) * kBytes<E>;
    const int left = call.inner - whole;
    for (int row = 0; row < kRows; row++) {
      const Own own = last_piece<E>(input + row * call.input_stride + at, left);
      for (int wide = 0; wide < kWide; wide++) {
        const Own weights = last_piece<E>(weight + wide * call.weight_stride + at, left);
        sums[row][wide] = Own::add_product(sums[row][wide], weights, own);
      }
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int wide = 0; wide < kWide; wide++) products[row][column + wide] = sums[row][wide];
}

// Outputs first .. first + count - 1, at most 16, of kRows rows from `row` on.
template <Element E, int kRows>
__attribute__((noinline)) void finish_outputs(const LinearCall& call, int row, int first, int count) {
  Lanes products[kRows][16];
  if (count < 16)
    for (int i = 0; i < kRows; i++)
      for (int column = count; column < 16; column++) products[i][column] = zero();
  const char* input = call.input + row * call.input_stride;
  const char* weight = call.weight + first * call.weight_stride;
  constexpr int kWide = kWeightRows<kRows>;
  int column = 0;
  for (; column + kWide <= count; column += kWide)
    multiply<E, kRows, kWide>(call, input, weight + column * call.weight_stride, products, column);
  for (; column < count; column++) multiply<E, kRows, 1>(call, input, weight + column * call.weight_stride, products, column);
  const Lanes bias = call.bias ? load_elements<E>(call.bias + first * kBytes<E>, count) : zero();
  for (int i = 0; i < kRows; i++) {
    char* output = call.output + (static_cast<int64_t>(row + i) * call.outputs + first) * kBytes<E>;
    store_elements<E>(output, sums_of(products[i]) + bias, count);
  }
}

template <Element E>
void finish_rows(const LinearCall& call, int first, int count) {
  for (int row = 0; row < call.rows; row += kRowsTogether) {
    switch (call.rows - row) {
      case 1: finish_outputs<E, 1>(call, row, first, count); break;
      case 2: finish_outputs<E, 2>(call, row, first, count); break;
      case 3: finish_outputs<E, 3>(call, row, first, count); break;
#ifdef __AVX512F__
      case 4: finish_outputs<E, 4>(call, row, first, count); break;
      case 5: finish_outputs<E, 5>(call, row, first, count); break;
      case 6: finish_outputs<E, 6>(call, row, first, count); break;
      case 7: finish_outputs<E, 7>(call, row, first, count); break;
#endif
      default: finish_outputs<E, kRowsTogether>(call, row, first, count);
    }
  }
}

template <Element E>
void linear(const LinearCall& call, int thread, int threads) {
  const int64_t blocks = (static_cast<int64_t>(call.outputs) + 15) / 16, end = blocks * (thread + 1) / threads;
  for (int64_t block = blocks * thread / threads; block < end; block++) {
    const int first = static_cast<int>(16 * block), left = call.outputs - first;
    finish_rows<E>(call, first, left < 16 ? left : 16);
  }
}

}  // namespace KILBURN_ISA
