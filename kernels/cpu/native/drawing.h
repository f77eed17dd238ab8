// A token for each of some rows of logits, drawn with the random numbers that are the row's own: what executor/race.py and the
// cutoffs of executor/sampler.py do with torch, in a few passes over a row that stays in the cache, and without sorting it.
//
// A row's logits less its largest, over its temperature, are `t`, at most 0; `w` is e^t.
//
//     cutoff   top-k and top-p cut where a running sum from the most likely token down, of ones or of w, reaches a target. One pass
//              finds between which of some thresholds that is; what lies there is gathered, and looked at again, until it is little
//              enough to be sorted.
//     race     the token with the largest t + noise wins. The noise of token i is word i % 4 of Philox with key = seed, counter =
//              (i / 4, position, index, domain). The likely ones are drawn first: who could not win with the largest noise that
//              there is, is not drawn; and two logarithms are taken only of words that could win.
#pragma once

#include "lanes.h"
#include "layout.h"

namespace KILBURN_ISA {

constexpr int kThresholds = 8;
constexpr int kFewCandidates = 48;  // that are sorted
constexpr double kManyCandidates = 512;
constexpr int kWholePasses = 4;     // over the whole row, where there are many candidates
constexpr int kMostPasses = 24;     // each leaves a ninth of the 2^32 values that there are; then only equal ones are left

// The thresholds of the first pass: the boundary of most rows lies between the first ones.
constexpr float kFirstThresholds[kThresholds] = {-0.5f, -1.5f, -3.0f, -5.0f, -7.0f, -9.0f, -12.0f, -16.0f};

// The noise of the word 2^32 - 1, with a margin for the rounding of a comparison; and how far below the most likely one a token may
// be to be drawn before the others.
constexpr double kMostNoise = 22.8738544 + 1e-5;
constexpr float kNear = -4.0f;

constexpr uint32_t kDomain = 0x4B494C42;  // "KILB"

// One bit for each lane that lies in low <= x < high.
ALWAYS_INLINE uint32_t lanes_between(Lanes x, Lanes low, Lanes high) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(x.v, low.v, _CMP_GE_OQ) & _mm512_cmp_ps_mask(x.v, high.v, _CMP_LT_OQ);
#else
  const auto half = [](__m256 a, __m256 b, __m256 c) {
    const __m256 in = _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ), _mm256_cmp_ps(a, c, _CMP_LT_OQ));
    return static_cast<uint32_t>(_mm256_movemask_ps(in));
  };
  return half(x.low, low.low, high.low) | half(x.high, low.high, high.high) << 8;
#endif
}

ALWAYS_INLINE uint32_t lanes_from(Lanes x, float low) { return lanes_between(x, all(low), all(__builtin_inff())); }

// One thread's room for one row. All but the candidates have a whole number of lanes, with t = -inf and w = 0 behind the row.
struct DrawRoom {
  float* t;
  float* w;
  float* candidates;  // some t, in no order
  float* weights;     // theirs: w, or 1

  static int64_t padded(int size) { return (static_cast<int64_t>(size) + 15) / 16 * 16; }
  static int64_t bytes(int size) { return draw_room_bytes(size); }
  DrawRoom(char* workspace, int size) : t(reinterpret_cast<float*>(workspace)) {
    w = t + padded(size);
    candidates = w + padded(size);
    weights = candidates + padded(size);
  }
};

// Magnitudes of t as whole numbers that grow as t falls.
ALWAYS_INLINE uint32_t key_of(float t) {
  uint32_t bits;
  memcpy(&bits, &t, sizeof bits);
  return bits & 0x7fffffff;
}
ALWAYS_INLINE float of_key(uint32_t key) {
  const uint32_t bits = key | 0x80000000;
  float t;
  memcpy(&t, &bits, sizeof t);
  return t;
}

// What lies at or above each threshold: sums of weights, where `counted` of ones. In blocks, so that float32 is enough within one.
inline void sums_above(const float* t, const float* w, int count, bool counted, const float* thresholds, double* sums) {
  constexpr int kBlock = 1024;
  for (int k = 0; k < kThresholds; k++) sums[k] = 0;
  for (int at = 0; at < count; at += kBlock) {
    const int end = count - at < kBlock ? count : at + kBlock;
    Lanes parts[kThresholds];
    for (Lanes& part : parts) part = zero();
    for (int i = at; i < end; i += 16) {
      const Lanes x = load(t + i), weight = counted ? all(1.0f) : load(w + i);
      for (int k = 0; k < kThresholds; k++) parts[k] = parts[k] + where_less(x, all(thresholds[k]), zero(), weight);
    }
    for (int k = 0; k < kThresholds; k++) sums[k] += sum_of(parts[k]);
  }
}

// Gather what lies in low <= t < high, with its weight, and fill the last lanes up with -inf; it may be gathered in place.
inline int gather(const float* t, const float* w, int count, float low, float high, float* to, float* weights) {
  int found = 0;
  for (int i = 0; i < count; i += 16)
    for (uint32_t mask = lanes_between(load(t + i), all(low), all(high)); mask; mask &= mask - 1) {
      const int from = i + __builtin_ctz(mask);
      const float x = t[from], weight = w[from];
      to[found] = x;
      weights[found++] = weight;
    }
  for (int i = found; i % 16; i++) {
    to[i] = -__builtin_inff();
    weights[i] = 0;
  }
  return found;
}

// Sort pairs, the largest t first: a heap, since equal ones may be as many as the row has.
inline void sort_falling(float* t, float* w, int count) {
  const auto sift = [&](int at, int end) {
    for (int child; (child = 2 * at + 1) < end; at = child) {
      if (child + 1 < end && t[child + 1] < t[child]) child++;
      if (t[at] <= t[child]) return;
      const float x = t[at], weight = w[at];
      t[at] = t[child], w[at] = w[child];
      t[child] = x, w[child] = weight;
    }
  };
  for (int at = count / 2; at-- > 0;) sift(at, count);
  for (int end = count; end-- > 1;) {
    const float x = t[0], weight = w[0];
    t[0] = t[end], w[0] = w[end];
    t[end] = x, w[end] = weight;
    sift(0, end);
  }
}

// The value at which the sum of weights from the largest t down reaches `target`: that of the first token that reaches it.
inline float boundary(const DrawRoom& room, int padded, bool counted, double target) {
  float thresholds[kThresholds];
  memcpy(thresholds, kFirstThresholds, sizeof thresholds);
  const float *t = room.t, *w = room.w;
  int count = padded;
  float low = -__builtin_inff(), high = __builtin_inff();
  double above = 0;  // the weights of t >= high, which are less than the target
  for (int pass = 0;; pass++) {
    double sums[kThresholds];
    sums_above(t, w, count, counted, thresholds, sums);
    int k = 0;  // the first threshold at which the target is reached
    const double before = t == room.t ? 0 : above;  // what the sums are without: nothing, or all that was not gathered
    double within = __builtin_inf();  // the weights of low <= t < high
    while (k < kThresholds && before + sums[k] < target) {
      above = before + sums[k];
      high = thresholds[k++];
    }
    if (k < kThresholds) {
      low = thresholds[k];
      within = before + sums[k] - above;
    }
    // To gather many takes longer than to look at the whole row once more.
    const bool many = t == room.t && (counted ? within : within * __builtin_exp(-low)) > kManyCandidates && pass < kWholePasses;
    if (!many) {
      count = gather(t, w, count, low, high, room.candidates, room.weights);
      t = room.candidates, w = room.weights;
    }
    const uint32_t first = high > 0 ? 0 : key_of(high) + 1, last = key_of(low);  // of what may be there
    if (!many && (count <= kFewCandidates || first >= last || pass == kMostPasses)) break;
    for (int i = 0; i < kThresholds; i++)
      thresholds[i] = of_key(first + static_cast<uint32_t>((static_cast<uint64_t>(last - first) * (i + 1)) / (kThresholds + 1)));
    count = (count + 15) / 16 * 16;
  }
  if (count == 0) return low;  // the sums of two passes differ by their rounding
  sort_falling(room.candidates, room.weights, count);
  int at = 0;
  for (; at + 1 < count; at++) {
    above += counted ? 1.0 : room.weights[at];
    if (above >= target) break;
  }
  return room.candidates[at];
}

// The sum of w of all t >= low.
inline double mass_from(const DrawRoom& room, int padded, float low) {
  constexpr int kBlock = 1024;
  double sum = 0;
  for (int at = 0; at < padded; at += kBlock) {
    const int end = padded - at < kBlock ? padded : at + kBlock;
    Lanes part = zero();
    for (int i = at; i < end; i += 16) part = part + where_less(load(room.t + i), all(low), zero(), load(room.w + i));
    sum += sum_of(part);
  }
  return sum;
}

// As many 32-bit words as a register has, multiplied to their low and high halves by a number that is the same for all.
#ifdef __AVX512F__
typedef __m512i Words;
ALWAYS_INLINE Words all_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
ALWAYS_INLINE Words exclusive_or(Words a, Words b) { return _mm512_xor_si512(a, b); }
ALWAYS_INLINE void multiply(Words x, Words by, Words& low, Words& high) {
  const Words even = _mm512_mul_epu32(x, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), by);
  low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
}
#else
typedef __m256i Words;
ALWAYS_INLINE Words all_words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
ALWAYS_INLINE Words exclusive_or(Words a, Words b) { return _mm256_xor_si256(a, b); }
ALWAYS_INLINE void multiply(Words x, Words by, Words& low, Words& high) {
  const Words even = _mm256_mul_epu32(x, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), by);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
#endif

// Philox 4x32-10 of sixteen counters that differ in their first word: `words` are those of each counter side by side, and `missing`
// is 1 - u for each of them, to float32's rounding.
inline void philox(const uint32_t* first, const DrawRow& row, uint32_t* words, float* missing) {
  constexpr int kWidth = sizeof(Words) / sizeof(uint32_t);
  alignas(64) uint32_t made[4][16];
  for (int at = 0; at < 16; at += kWidth) {
    Words c0, c1 = all_words(row.position), c2 = all_words(row.index), c3 = all_words(kDomain);
    memcpy(&c0, first + at, sizeof c0);
    uint32_t k0 = row.seed_low, k1 = row.seed_high;
    for (int round = 0; round < 10; round++) {
      Words low0, high0, low1, high1;
      multiply(c0, all_words(0xD2511F53), low0, high0);
      multiply(c2, all_words(0xCD9E8D57), low1, high1);
      c0 = exclusive_or(exclusive_or(high1, c1), all_words(k0));
      c2 = exclusive_or(exclusive_or(high0, c3), all_words(k1));
      c1 = low1;
      c3 = low0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    memcpy(made[0] + at, &c0, sizeof c0);
    memcpy(made[1] + at, &c1, sizeof c1);
    memcpy(made[2] + at, &c2, sizeof c2);
    memcpy(made[3] + at, &c3, sizeof c3);
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 4; k++) words[4 * i + k] = made[k][i];
  // Halved, so that it has a sign to spare: not every instruction set converts numbers without one. What that
  // loses is at most 2^-32, downwards: a word too many is looked at, never one too few.
  for (int i = 0; i < 64; i++) {
    const uint32_t rest = ~words[i];
    missing[i] = (static_cast<float>(static_cast<int32_t>(rest >> 1)) * 2.0f + 0.5f) * 0x1p-32f;
  }
}

// The race of one row: quads of tokens are added one by one, and drawn sixteen at a time.
class Race {
 public:
  Race(const DrawRow& row, const DrawRoom& room, float cutoff) : row_(row), room_(room), cutoff_(cutoff) {}

  ALWAYS_INLINE void add(int quad) {
    quads_[waiting_++] = static_cast<uint32_t>(quad);
    if (waiting_ == 16) draw();
  }

  void draw() {
    if (waiting_ == 0) return;
    for (int i = waiting_; i < 16; i++) quads_[i] = 0;
    alignas(64) uint32_t words[64];
    alignas(64) float missing[64];
    philox(quads_, row_, words, missing);
    for (int i = 0; i < waiting_; i++) {
      // Winning takes -log(u) <= e^(t - best), and 1 - u <= -log(u).
      const int first = static_cast<int>(quads_[i] * 4);
      const __m128 most = _mm_mul_ps(_mm_loadu_ps(room_.w + first), _mm_set1_ps(allowed_));
      const __m128 able = _mm_cmple_ps(_mm_load_ps(missing + 4 * i), most);
      const __m128 kept = _mm_cmpge_ps(_mm_loadu_ps(room_.t + first), _mm_set1_ps(cutoff_));
      for (int mask = _mm_movemask_ps(_mm_and_ps(able, kept)); mask; mask &= mask - 1) {
        const int k = __builtin_ctz(static_cast<unsigned>(mask));
        contest(first + k, words[4 * i + k]);
      }
    }
    waiting_ = 0;
  }

  int winner() const { return winner_; }

  // Lower ones have lost, whatever their noise.
  float limit() const {
    const auto least = static_cast<float>(best_ - kMostNoise);
    return least > cutoff_ ? least : cutoff_;
  }

 private:
  void contest(int token, uint32_t word) {
    const double sum = room_.t[token] - __builtin_log(-__builtin_log((word + 0.5) * 0x1p-32));
    if (sum < best_ || (sum == best_ && token > winner_)) return;
    best_ = sum;
    winner_ = token;
    allowed_ = static_cast<float>(1.001 * __builtin_exp(-best_));
  }

  const DrawRow& row_;
  const DrawRoom& room_;
  const float cutoff_;
  uint32_t quads_[16];
  int waiting_ = 0;
  int winner_ = 0;
  double best_ = -__builtin_inf();
  float allowed_ = __builtin_inff();
};

inline int draw_row(const float* logits, int size, const DrawRow& row, const DrawRoom& room) {
  const int padded = static_cast<int>(DrawRoom::padded(size));
  const Lanes peak = all(row.peak), temperature = all(row.temperature);
  for (int i = 0; i < padded; i += 16) {
    const int left = size - i;
    Lanes t = (load_elements<kFloat32>(reinterpret_cast<const char*>(logits + i), left) - peak) / temperature;
    Lanes w = exp2(t * all(kLog2E));
    if (left < 16) {
      t = where_within(0, left, t, all(-__builtin_inff()));
      w = where_within(0, left, w, zero());
    }
    store(room.t + i, t);
    store(room.w + i, w);
  }
  float cutoff = row.least;
  if (row.top_k > 0 && row.top_k < size) {
    const float kth = boundary(room, padded, true, row.top_k);
    cutoff = kth > cutoff ? kth : cutoff;
    if (row.top_p < 1) {
      const float last = boundary(room, padded, false, row.top_p * mass_from(room, padded, kth));
      cutoff = last > cutoff ? last : cutoff;
    }
  } else if (row.top_p < 1) {
    const float last = boundary(room, padded, false, row.top_p * mass_from(room, padded, -__builtin_inff()));
    cutoff = last > cutoff ? last : cutoff;
  }
  Race race(row, room, cutoff);
  const float near = cutoff > kNear ? cutoff : kNear;
  const auto quads_of = [](uint32_t mask) {  // bit 4 q: any lane of quad q
    mask |= mask >> 1;
    return (mask | mask >> 2) & 0x1111;
  };
  for (int i = 0; i < padded; i += 16)
    for (uint32_t quads = quads_of(lanes_from(load(room.t + i), near)); quads; quads &= quads - 1)
      race.add((i + __builtin_ctz(quads)) / 4);
  race.draw();
  if (near > cutoff) {
    for (int i = 0; i < padded; i += 16) {
      const Lanes t = load(room.t + i);
      const uint32_t able = lanes_from(t, race.limit());
      if (!able) continue;
      for (uint32_t quads = quads_of(able) & ~quads_of(lanes_from(t, near)); quads; quads &= quads - 1)
        race.add((i + __builtin_ctz(quads)) / 4);
    }
    race.draw();
  }
  return race.winner();
}

inline void draw(const DrawCall& call, int thread, int threads) {
  const DrawRoom room(call.workspace + thread * DrawRoom::bytes(call.size), call.size);
  const int end = static_cast<int>(static_cast<int64_t>(call.count) * (thread + 1) / threads);
  for (int i = static_cast<int>(static_cast<int64_t>(call.count) * thread / threads); i < end; i++) {
    const DrawRow& row = call.rows[i];
    const auto* logits = reinterpret_cast<const float*>(call.input + row.row * call.input_stride);
    call.tokens[i] = draw_row(logits, call.size, row, room);
  }
}

}  // namespace KILBURN_ISA
