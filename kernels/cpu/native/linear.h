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

// How the work is cut, found by measurement.
//
// The input's rows are put together first, piece by piece, as many rows side by side as share each load of the weight: as many as
// there are registers for sums.
#ifdef __AVX512F__
constexpr int kRowsTogether = 8;
#else
constexpr int kRowsTogether = 4;
#endif

// With so many rows the processor no longer runs far enough ahead to keep the memory busy, and is told what comes.
constexpr int kRowsToldAhead = kRowsTogether == 8 ? 3 : 2;
constexpr int kAheadBytes = 12 * 1024;

// Rows of the weight that share each load of the input.
template <int kRows>
constexpr int kOutputsTogether = kRowsTogether == 8 && kRows >= kRowsToldAhead ? 2 : 1;

// Of the input, as it was put together: so much stays in the first cache while 16 rows of the weight pass by.
constexpr int kChunkBytes = 20 * 1024;

template <Element E>
int pieces_of(const LinearCall& call) {
  return (call.inner + Piece<E>::kElements - 1) / Piece<E>::kElements;
}

template <Element E>
int64_t linear_workspace(const LinearCall& call) {
  return static_cast<int64_t>(call.rows) * pieces_of<E>(call) * static_cast<int64_t>(sizeof(Piece<E>));
}

// The rows from `row` on that are worked on together, [pieces][rows].
template <Element E>
ALWAYS_INLINE Piece<E>* together(const LinearCall& call, int row) {
  return reinterpret_cast<Piece<E>*>(call.workspace) + static_cast<int64_t>(row) * pieces_of<E>(call);
}

template <Element E>
void gather_rows(const LinearCall& call) {
  constexpr int kElements = Piece<E>::kElements;
  for (int first = 0; first < call.rows; first += kRowsTogether) {
    const int count = call.rows - first < kRowsTogether ? call.rows - first : kRowsTogether;
    for (int row = 0; row < count; row++) {
      const char* from = call.input + (first + row) * call.input_stride;
      Piece<E>* to = together<E>(call, first) + row;
      for (int i = 0; i < call.inner; i += kElements, to += count) {
        const char* at = from + static_cast<int64_t>(i) * kBytes<E>;
        *to = call.inner - i < kElements ? last_piece<E>(at, call.inner - i) : Piece<E>::at(at);
      }
    }
  }
}

// sums[row][column ..] += kRows rows of the input times kColumns rows of the weight, of so many elements; what was there before
// counts as zero if these are the first ones. `next` is what will be read of the weight some time later.
template <Element E, int kRows, int kColumns>
ALWAYS_INLINE void multiply(const char* weight, int64_t stride, const char* next, const Piece<E>* input, int elements, bool first,
                            Lanes (&sums)[kRows][16], int column) {
  using Own = Piece<E>;
  Lanes own[kRows][kColumns];
  for (int row = 0; row < kRows; row++)
    for (int i = 0; i < kColumns; i++) own[row][i] = first ? zero() : sums[row][column + i];
  const int64_t ahead = next - weight;
  for (; elements >= Own::kElements; elements -= Own::kElements, weight += 64, input += kRows) {
    Own weights[kColumns];
    for (int i = 0; i < kColumns; i++) weights[i] = Own::at(weight + i * stride);
    if constexpr (kRows >= kRowsToldAhead)
      for (int i = 0; i < kColumns; i++) _mm_prefetch(weight + i * stride + ahead, _MM_HINT_T1);
    for (int row = 0; row < kRows; row++)
      for (int i = 0; i < kColumns; i++) own[row][i] = Own::add_product(own[row][i], weights[i], input[row]);
  }
  if (elements > 0) {
    for (int i = 0; i < kColumns; i++) {
      const Own weights = last_piece<E>(weight + i * stride, elements);
      for (int row = 0; row < kRows; row++) own[row][i] = Own::add_product(own[row][i], weights, input[row]);
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int i = 0; i < kColumns; i++) sums[row][column + i] = own[row][i];
}

// Outputs begin .. begin + count - 1, at most 16, of kRows rows from `row` on.
template <Element E, int kRows>
__attribute__((noinline)) void finish_outputs(const LinearCall& call, int row, int begin, int count) {
  constexpr int kElements = Piece<E>::kElements, kTogether = kOutputsTogether<kRows>;
  constexpr int kMost = kChunkBytes / static_cast<int>(sizeof(Piece<E>)) / kRows;
  const int pieces = pieces_of<E>(call), chunks = (pieces + kMost - 1) / kMost;
  const int in_chunk = chunks ? (pieces + chunks - 1) / chunks : 0;
  const int64_t stride = call.weight_stride;
  Lanes sums[kRows][16] = {};
  const Piece<E>* input = together<E>(call, row);
  const char* weight = call.weight + begin * stride;
  for (int done = 0; done < pieces; done += in_chunk, input += in_chunk * kRows) {
    const int left = call.inner - done * kElements, elements = left < in_chunk * kElements ? left : in_chunk * kElements;
    const int bytes = elements * kBytes<E>;
    const char* chunk = weight + 64 * static_cast<int64_t>(done);
    // The chunk is read row by row; behind it comes this block's next one, or the first one of the next block.
    const int rows_ahead = (kAheadBytes / bytes / kTogether + 1) * kTogether;
    const char* behind = left > elements ? chunk + bytes : weight + 16 * stride;
    const auto next = [&](int column) {
      const int then = column + (rows_ahead < 16 ? rows_ahead : 16);
      return then < 16 ? chunk + then * stride : behind + (then - 16) * stride;
    };
    int column = 0;
    for (; column + kTogether <= count; column += kTogether)
      multiply<E, kRows, kTogether>(chunk + column * stride, stride, next(column), input, elements, done == 0, sums, column);
    for (; column < count; column++)
      multiply<E, kRows, 1>(chunk + column * stride, stride, next(column), input, elements, done == 0, sums, column);
  }
  const Lanes bias = call.bias ? load_elements<E>(call.bias + begin * kBytes<E>, count) : zero();
  for (int i = 0; i < kRows; i++) {
    char* output = call.output + (static_cast<int64_t>(row + i) * call.outputs + begin) * kBytes<E>;
    store_elements<E>(output, sums_of(sums[i]) + bias, count);
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

// After gather_rows, by one thread.
template <Element E>
void linear(const LinearCall& call, int thread, int threads) {
  const int64_t blocks = (static_cast<int64_t>(call.outputs) + 15) / 16, end = blocks * (thread + 1) / threads;
  for (int64_t block = blocks * thread / threads; block < end; block++) {
    const int first = static_cast<int>(16 * block), left = call.outputs - first;
    finish_rows<E>(call, first, left < 16 ? left : 16);
  }
}

}  // namespace KILBURN_ISA
