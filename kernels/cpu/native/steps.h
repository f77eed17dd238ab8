// A step, 32 elements of K, of V or of a packed weight, meets a pair of numbers: the product that everything here is made of.
#pragma once

#include "lanes.h"

namespace KILBURN_ISA {

// 32 elements in two halves, to be multiplied with a pair of float32.
template <Element E>
struct Step {
  static constexpr int kPairBytes = 8;
  Lanes first, second;

  static ALWAYS_INLINE Step load(const char* p) {
    if constexpr (E == kBfloat16) return {low_bfloat16(p), high_bfloat16(p)};
    return {load_elements<E>(p), load_elements<E>(p + 16 * kBytes<E>)};
  }
  ALWAYS_INLINE Lanes dot(const char* pair, Lanes sum) const {
    const float* f = reinterpret_cast<const float*>(pair);
    return fma(second, all(f[1]), fma(first, all(f[0]), sum));
  }
  // The power of two that a softmax's weight is.
  static ALWAYS_INLINE Lanes power(Lanes x) { return exp2(x); }
  // Sixteen of q or p, at element `index`; returns what will be multiplied.
  static ALWAYS_INLINE Lanes put(char* row, int index, Lanes x) {
    store(reinterpret_cast<float*>(row) + index, x);
    return x;
  }
  // Two times sixteen, side by side; returns `total` and the sum of what will be multiplied, in lanes.
  static ALWAYS_INLINE Lanes put_two(char* row, int index, Lanes a, Lanes b, Lanes total) {
    total = total + put(row, index, a);
    return total + put(row, index + 16, b);
  }
};

#ifdef __AVX512BF16__
// The same of bfloat16, to be multiplied with a pair of bfloat16 in one operation.
template <>
struct Step<kBfloat16> {
  static constexpr int kPairBytes = 4;
  __m512i bits;

  static ALWAYS_INLINE Step load(const char* p) { return {_mm512_loadu_si512(p)}; }
  ALWAYS_INLINE Lanes dot(const char* pair, Lanes sum) const {
    int both;
    memcpy(&both, pair, sizeof both);
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(bits), reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)))};
  }
  static ALWAYS_INLINE Lanes power(Lanes x) { return exp2_coarse(x); }
  static ALWAYS_INLINE Lanes put(char* row, int index, Lanes x) {
    const __m256i rounded = to_bfloat16(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * index), rounded);
    return from_bfloat16(rounded);
  }
  static ALWAYS_INLINE Lanes put_two(char* row, int index, Lanes a, Lanes b, Lanes total) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
    _mm512_storeu_si512(row + 2 * index, reinterpret_cast<__m512i>(both));
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    return {_mm512_dpbf16_ps(total.v, both, reinterpret_cast<__m512bh>(ones))};
  }
};
#endif

// Have one step's bytes fetched into the second cache level. (Into the first one, or in the order of addresses, is far slower.)
template <Element E>
ALWAYS_INLINE void fetch(const char* p) {
  _mm_prefetch(p, _MM_HINT_T1);
  if constexpr (E == kFloat32) _mm_prefetch(p + 64, _MM_HINT_T1);
}

}  // namespace KILBURN_ISA
