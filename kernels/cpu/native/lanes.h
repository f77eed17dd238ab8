// Sixteen float32 lanes, on the instruction set that this file is compiled for: AVX2 with FMA and F16C, or AVX-512 (F, BW, DQ, VL).
//
// Everything lies in a namespace named by the instruction set: the linker must never take a function that
// was compiled for a newer set than the one that runs. For the same reason nothing of the standard library is used.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace KILBURN_ISA {

#ifdef __AVX512F__

struct Lanes {
  __m512 v;
};

ALWAYS_INLINE Lanes zero() { return {_mm512_setzero_ps()}; }
ALWAYS_INLINE Lanes all(float x) { return {_mm512_set1_ps(x)}; }
ALWAYS_INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
ALWAYS_INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
ALWAYS_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
ALWAYS_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
ALWAYS_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
ALWAYS_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
ALWAYS_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in the second argument stays, one in the first is lost.
ALWAYS_INLINE Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
ALWAYS_INLINE Lanes magnitude(Lanes x) { return {_mm512_abs_ps(x.v)}; }
ALWAYS_INLINE Lanes nearest(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
ALWAYS_INLINE float max_of(Lanes x) { return _mm512_reduce_max_ps(x.v); }
ALWAYS_INLINE float sum_of(Lanes x) { return _mm512_reduce_add_ps(x.v); }
ALWAYS_INLINE float first_of(Lanes x) { return _mm512_cvtss_f32(x.v); }

// x * 2^n for whole n of -150 to 127.
ALWAYS_INLINE Lanes scale_by(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.v, n.v)}; }

// `yes` where a < b, else `no`.
ALWAYS_INLINE Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
  return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), yes.v)};
}

// Whether one lane of a is more than that of b.
ALWAYS_INLINE bool any_more(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }

// x where x is NaN, else `no`.
ALWAYS_INLINE Lanes where_nan(Lanes x, Lanes no) { return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), x.v)}; }

// Lanes begin .. end - 1 of `inside`, the others of `outside`; begin and end may lie beyond 0 .. 16.
ALWAYS_INLINE Lanes where_within(int begin, int end, Lanes inside, Lanes outside) {
  const int low = begin < 0 ? 0 : begin > 16 ? 16 : begin, high = end < 0 ? 0 : end > 16 ? 16 : end;
  const auto mask = static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
  return {_mm512_mask_mov_ps(outside.v, mask, inside.v)};
}

ALWAYS_INLINE Lanes from_bfloat16(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
ALWAYS_INLINE Lanes from_float16(__m256i x) { return {_mm512_cvtph_ps(x)}; }
ALWAYS_INLINE __m256i to_float16(Lanes x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

ALWAYS_INLINE __m256i to_bfloat16(Lanes x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

// The low and the high halves of 16 pairs of bfloat16.
ALWAYS_INLINE Lanes low_bfloat16(const char* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
ALWAYS_INLINE Lanes high_bfloat16(const char* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

#else  // AVX2

struct Lanes {
  __m256 low, high;
};

ALWAYS_INLINE Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ALWAYS_INLINE Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ALWAYS_INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ALWAYS_INLINE void store(float* p, Lanes x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
ALWAYS_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
ALWAYS_INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
ALWAYS_INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
ALWAYS_INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
ALWAYS_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// A NaN in the second argument stays, one in the first is lost.
ALWAYS_INLINE Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
ALWAYS_INLINE Lanes magnitude(Lanes x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
ALWAYS_INLINE Lanes nearest(Lanes x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}
ALWAYS_INLINE float first_of(Lanes x) { return _mm256_cvtss_f32(x.low); }
ALWAYS_INLINE float max_of(Lanes x) {
  const __m256 a = _mm256_max_ps(x.low, x.high);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
ALWAYS_INLINE float sum_of(Lanes x) {
  const __m256 a = _mm256_add_ps(x.low, x.high);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// x * 2^n for whole n of -150 to 127, in two factors, since 2^-150 is no float.
ALWAYS_INLINE __m256 scale_half(__m256 x, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(x, first), second);
}
ALWAYS_INLINE Lanes scale_by(Lanes x, Lanes n) { return {scale_half(x.low, n.low), scale_half(x.high, n.high)}; }

// `yes` where a < b, else `no`.
ALWAYS_INLINE Lanes where_less(Lanes a, Lanes b, Lanes yes, Lanes no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}

// Whether one lane of a is more than that of b.
ALWAYS_INLINE bool any_more(Lanes a, Lanes b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))) != 0;
}

// x where x is NaN, else `no`.
ALWAYS_INLINE Lanes where_nan(Lanes x, Lanes no) {
  return {_mm256_blendv_ps(no.low, x.low, _mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q)),
          _mm256_blendv_ps(no.high, x.high, _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q))};
}

// Lanes begin .. end - 1 of `inside`, the others of `outside`; begin and end may lie beyond 0 .. 16.
ALWAYS_INLINE Lanes where_within(int begin, int end, Lanes inside, Lanes outside) {
  const __m256i first = _mm256_set1_epi32(begin), last = _mm256_set1_epi32(end);
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  const __m256i in_low = _mm256_andnot_si256(_mm256_cmpgt_epi32(first, low), _mm256_cmpgt_epi32(last, low));
  const __m256i in_high = _mm256_andnot_si256(_mm256_cmpgt_epi32(first, high), _mm256_cmpgt_epi32(last, high));
  return {_mm256_blendv_ps(outside.low, inside.low, _mm256_castsi256_ps(in_low)),
          _mm256_blendv_ps(outside.high, inside.high, _mm256_castsi256_ps(in_high))};
}

ALWAYS_INLINE Lanes from_bfloat16(__m256i x) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
ALWAYS_INLINE Lanes from_float16(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
ALWAYS_INLINE __m256i to_float16(Lanes x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm256_set_m128i(_mm256_cvtps_ph(x.high, kMode), _mm256_cvtps_ph(x.low, kMode));
}
ALWAYS_INLINE __m256i rounded_half(__m256 x) {  // bfloat16 in the low halves of eight 32-bit lanes
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
ALWAYS_INLINE __m256i to_bfloat16(Lanes x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded_half(x.low), rounded_half(x.high)), 0xd8);
}

// The low and the high halves of 16 pairs of bfloat16.
ALWAYS_INLINE __m256i load_bits(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
ALWAYS_INLINE Lanes low_bfloat16(const char* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(load_bits(p + 32), 16))};
}
ALWAYS_INLINE Lanes high_bfloat16(const char* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(load_bits(p), mask)), _mm256_castsi256_ps(_mm256_and_si256(load_bits(p + 32), mask))};
}

#endif

// 2^x for x up to 127; what is below 2^-150 is 0 or as good as 0; NaN stays. A minimax polynomial of 2^f on -1/2 .. 1/2: error 2e-7.
ALWAYS_INLINE Lanes exp2(Lanes x) {
  x = max(all(-150.0f), x);
  const Lanes n = nearest(x), f = x - n;
  Lanes r = fma(all(0.00133952f), f, all(0.00967604f));
  r = fma(r, f, all(0.05550327f));
  r = fma(r, f, all(0.24022110f));
  r = fma(r, f, all(0.69314720f));
  r = fma(r, f, all(1.0f));
  return scale_by(r, n);
}

// The same for what is rounded to bfloat16: error 8e-5, a twentieth of the rounding's.
ALWAYS_INLINE Lanes exp2_coarse(Lanes x) {
  x = max(all(-150.0f), x);
  const Lanes n = nearest(x), f = x - n;
  Lanes r = fma(all(0.05517167f), f, all(0.24261113f));
  r = fma(r, f, all(0.69326099f));
  r = fma(r, f, all(0.99992807f));
  return scale_by(r, n);
}

// 1 - 2 / (e^2x + 1) loses digits near 0, where the series takes over.
ALWAYS_INLINE Lanes tanh(Lanes x) {
  const Lanes square = x * x;
  Lanes series = fma(all(0.02186949f), square, all(-0.05396825f));
  series = fma(series, square, all(0.13333333f));
  series = fma(series, square, all(-0.33333333f));
  series = fma(series * square, x, x);
  constexpr float kTwoOverLn2 = 2.885390081777927f;
  // Beyond 20 it is 1 or -1. The order keeps NaN.
  const Lanes bounded = zero() - max(all(-20.0f), zero() - max(all(-20.0f), x));
  const Lanes closed = all(1.0f) - all(2.0f) / (exp2(bounded * all(kTwoOverLn2)) + all(1.0f));
  return where_less(magnitude(x), all(0.3f), series, closed);
}

// Sixteen elements, or the first `count` of them with zeros behind: never a byte beyond them.
template <Element E>
ALWAYS_INLINE Lanes load_elements(const char* p) {
  if constexpr (E == kFloat32) return load(reinterpret_cast<const float*>(p));
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return E == kBfloat16 ? from_bfloat16(bits) : from_float16(bits);
}

template <Element E>
ALWAYS_INLINE void store_elements(char* p, Lanes x) {
  if constexpr (E == kFloat32) {
    store(reinterpret_cast<float*>(p), x);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), E == kBfloat16 ? to_bfloat16(x) : to_float16(x));
  }
}

template <Element E>
constexpr int kBytes = E == kFloat32 ? 4 : 2;

// What is left of x in this dtype.
template <Element E>
ALWAYS_INLINE Lanes rounded(Lanes x) {
  if constexpr (E == kFloat32) return x;
  return E == kBfloat16 ? from_bfloat16(to_bfloat16(x)) : from_float16(to_float16(x));
}

template <Element E>
ALWAYS_INLINE Lanes load_elements(const char* p, int count) {
  if (count >= 16) return load_elements<E>(p);
  alignas(64) char whole[64] = {};
  memcpy(whole, p, static_cast<size_t>(count) * kBytes<E>);
  return load_elements<E>(whole);
}

template <Element E>
ALWAYS_INLINE void store_elements(char* p, Lanes x, int count) {
  if (count >= 16) return store_elements<E>(p, x);
  alignas(64) char whole[64];
  store_elements<E>(whole, x);
  memcpy(p, whole, static_cast<size_t>(count) * kBytes<E>);
}

}  // namespace KILBURN_ISA
