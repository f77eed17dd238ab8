// Attention through a block table: softmax(rule(q k)) v by the online softmax (Milakov and Gimelshein, 2018), tile after tile.
//
// A tile is 128 tokens of one KV head. All query rows that read the head take part in each load of it: for a decode the heads of a
// group, for a prefill chunk those of several tokens. Rows are worked on a few at a time (kRows), so that scores stay in registers.
//
// Decodes: all tiles of all sequences and heads form one line, which is cut into one piece for each thread. Whoever has all tiles of
// an item (a sequence's KV head) writes its output; parts of an item go into slots, which one thread merges afterwards.
// Chunks: pieces of about kChunkRows rows by one KV head, taken from a counter by whoever is free. Nothing depends on who takes which.
//
// What lies in a slot that no row sees is never multiplied with anything that reaches an output: its score lies in a lane of its own
// and is masked, its V is not read or, beside a token that is seen, replaced by zeros.
#pragma once

#include "steps.h"
#include "tiles.h"

namespace KILBURN_ISA {

constexpr int kChunkRows = 48;

#ifdef __AVX512F__
constexpr int kRows = 6;             // 6 x 4 accumulators, of 32 registers
constexpr int kScoredTogether = 4;   // sub-tiles
constexpr int kColumnsTogether = 4;  // 16 dimensions each
#else
constexpr int kRows = 4;  // 4 x 1 accumulators of two registers each, of 16
constexpr int kScoredTogether = 1;
constexpr int kColumnsTogether = 1;
#endif

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  // finite, so that a difference of two of them is 0

// --------------------------------------------------------------------------------------------------------- the problem

template <Element E>
struct Problem {
  const AttendCall& call;
  Layout layout;
  int group;          // query heads of one KV head
  int query_bytes;    // of one row of q, as Step multiplies with it
  int value_floats;   // of one row's sums
  float scale;        // to scores in powers of two, without a soft-cap
  int chunk_tokens;   // tokens whose rows are worked on together

  explicit Problem(const AttendCall& c) : call(c), layout(c.layer) {
    group = c.q_heads / c.layer.kv_heads;
    query_bytes = (layout.key_steps * Step<E>::kPairBytes + 63) / 64 * 64;
    value_floats = layout.value_columns * 16;
    scale = c.softcap > 0 ? c.scale : c.scale * kLog2E;
    chunk_tokens = group >= kChunkRows ? 1 : kChunkRows / group;
  }

  int rows_together() const { return call.rows.sequences > call.rows.decodes ? chunk_tokens * group : group; }

  // The first position that a row at this one sees.
  int first_seen(int position) const {
    const int64_t first = int64_t(position) - call.window + 1;
    return call.window > 0 && first > 0 ? static_cast<int>(first) : 0;
  }
};

// What the softmax of some rows has come to: values are of e^(score - maximum).
struct Sums {
  float* maxima;   // [rows]
  float* weights;  // [rows][16]: the sum of weights, in lanes
  float* values;   // [rows][value_floats]

  Sums at(int row, int value_floats) const { return {maxima + row, weights + 16 * row, values + int64_t(row) * value_floats}; }
};

// A part of a decode's item.
struct Slot {
  int64_t* item;  // sequence * kv_heads + head, or -1
  Sums sums;
};

// One thread's memory in the workspace.
struct Memory {
  char* queries;  // [rows][query_bytes]
  Sums sums;
  int* begins;  // [rows], see Bounds
  int* ends;
  Scratch scratch;
  Slot slots[2];   // the item that began before this thread's piece; the one that goes on after it
};

template <Element E>
struct Workspace {
  static constexpr int kHeader = 64;  // an int64: the next piece of the chunks
  char* base;
  int64_t each;  // bytes for one thread

  Workspace(const Problem<E>& problem) : base(problem.call.workspace), each(0) { each = carve(problem, nullptr, nullptr); }

  int64_t bytes(int threads) const { return kHeader + each * threads; }
  int64_t* counter() const { return reinterpret_cast<int64_t*>(base); }
  Memory of(const Problem<E>& problem, int thread) const {
    Memory memory;
    carve(problem, base + kHeader + each * thread, &memory);
    return memory;
  }

 private:
  static char* take(char*& p, int64_t bytes) {
    char* taken = p;
    p += (bytes + 63) / 64 * 64;
    return taken;
  }
  static Sums take_sums(char*& p, int rows, int value_floats) {
    Sums sums;
    sums.maxima = reinterpret_cast<float*>(take(p, 4 * int64_t(rows)));
    sums.weights = reinterpret_cast<float*>(take(p, 64 * int64_t(rows)));
    sums.values = reinterpret_cast<float*>(take(p, 4 * int64_t(rows) * value_floats));
    return sums;
  }
  static int64_t carve(const Problem<E>& problem, char* start, Memory* memory) {
    Memory ignored;
    Memory& m = memory ? *memory : ignored;
    const Layout& layout = problem.layout;
    const int rows = problem.rows_together();
    char* p = start;
    m.queries = take(p, int64_t(rows) * problem.query_bytes);
    m.sums = take_sums(p, rows, problem.value_floats);
    m.begins = reinterpret_cast<int*>(take(p, 4 * int64_t(rows)));
    m.ends = reinterpret_cast<int*>(take(p, 4 * int64_t(rows)));
    m.scratch.keys = take(p, layout.width == kSubTile ? 0 : kSubTiles * int64_t(layout.key_steps) * layout.step_bytes);
    m.scratch.values = take(p, layout.width > 1 ? 0 : kPairs * int64_t(layout.row_bytes));
    for (auto& row : m.scratch.beside) row = take(p, layout.row_bytes);
    for (auto& slot : m.slots) {
      slot.item = reinterpret_cast<int64_t*>(take(p, 64));
      slot.sums = take_sums(p, problem.group, problem.value_floats);
    }
    return p - start;
  }
};

// ---------------------------------------------------------------------------------------------------------- one tile

// scores[row][token] = scale q k, of M rows and N sub-tiles, and tops[row] what is largest in its lane; what lies a tile further is
// fetched into the second cache level meanwhile.
template <Element E, int M, int N, bool kAhead>
ALWAYS_INLINE void score(const Problem<E>& problem, const char* queries, const char* const* keys, const char* const* next,
                         float (*scores)[kTile], Lanes* tops) {
  Lanes sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = zero();
  const int steps = problem.layout.key_steps;
#pragma GCC unroll 2
  for (int step = 0; step < steps; step++) {
    const int at = step * problem.layout.step_bytes;
    Step<E> key[N];
    for (int n = 0; n < N; n++) key[n] = Step<E>::load(keys[n] + at);
    if constexpr (kAhead)
      for (int n = 0; n < N; n++) fetch<E>(next[n] + at);
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) sums[m][n] = key[n].dot(queries + m * problem.query_bytes + step * Step<E>::kPairBytes, sums[m][n]);
  }
  const Lanes scale = all(problem.scale);
  for (int m = 0; m < M; m++) {
    Lanes top = tops[m];
    for (int n = 0; n < N; n++) {
      const Lanes x = sums[m][n] * scale;
      store(scores[m] + 16 * n, x);
      top = max(top, x);
    }
    tops[m] = top;
  }
}

// values = values * shrink + weights v, of M rows and C columns of 16 dimensions; without `shrink` nothing shrinks.
template <Element E, int M, int C, bool kAhead>
ALWAYS_INLINE void accumulate(const Problem<E>& problem, const Tile& tile, const char (*weights)[kPairs * Step<E>::kPairBytes],
                              const float* shrink, int column, int pair_begin, int pair_end, const char* const* next, float* values) {
  Lanes sums[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) sums[m][c] = load(values + int64_t(m) * problem.value_floats + (column + c) * 16);
  if (shrink) {
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sums[m][c] = sums[m][c] * all(shrink[m]);
  }
  const int at = column * problem.layout.step_bytes;
#pragma GCC unroll 2
  for (int pair = pair_begin; pair < pair_end; pair++) {
    const char* from = tile.values[pair] + at;
    if constexpr (kAhead) {
      const int row = problem.layout.key_bytes + pair % (kSubTile / 2) * problem.layout.row_bytes;
      const char* ahead = next[pair / (kSubTile / 2)] + row + at;
      for (int c = 0; c < C; c++) fetch<E>(ahead + c * problem.layout.step_bytes);
    }
    for (int c = 0; c < C; c++) {
      const Step<E> value = Step<E>::load(from + c * problem.layout.step_bytes);
      for (int m = 0; m < M; m++) sums[m][c] = value.dot(weights[m] + pair * Step<E>::kPairBytes, sums[m][c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) store(values + int64_t(m) * problem.value_floats + (column + c) * 16, sums[m][c]);
}

// Which tokens of a tile each row sees: begins[i * stride] .. ends[i * stride] - 1; both may lie beyond the tile. Null: all.
struct Bounds {
  const int* begins = nullptr;
  const int* ends = nullptr;
  int stride = 0;

  int begin(int row) const { return begins[row * stride]; }
  int end(int row) const { return ends[row * stride]; }
  Bounds from(int row) const { return begins ? Bounds{begins + row * stride, ends + row * stride, stride} : Bounds{}; }
  // Narrow the pairs low .. high - 1 to those that one of some rows sees.
  ALWAYS_INLINE void narrow(int rows, int& low, int& high) const {
    if (!begins) return;
    int first = kTile, last = 0;
    for (int row = 0; row < rows; row++) {
      if (begin(row) >= end(row)) continue;
      first = begin(row) < first ? begin(row) : first;
      last = end(row) > last ? end(row) : last;
    }
    first = first < 0 ? 0 : first / 2;
    last = last > kTile ? kPairs : (last + 1) / 2;
    low = first > low ? first : low;
    high = last < high ? last : high;
  }
};

// How far, in powers of two, scores may be above what they are taken relative to: a maximum stays until then, and nothing has to
// shrink. Weights reach 2^8 so, whose sums are as far from the largest float as ever.
constexpr float kHeadroom = 8.0f;

// What the rule and the bounds make of M rows' scaled scores, and again what is largest.
template <Element E, int M>
ALWAYS_INLINE void cap_and_mask(const Problem<E>& problem, const Tile& tile, Bounds bounds, float (*scores)[kTile], Lanes* tops) {
  const float softcap = problem.call.softcap;
  for (int m = 0; m < M; m++) {
    Lanes top = all(kLowest);
    for (int sub = tile.sub_begin; sub < tile.sub_end; sub++) {
      Lanes x = load(scores[m] + 16 * sub);
      if (softcap > 0) x = tanh(x / all(softcap)) * all(softcap * kLog2E);
      if (bounds.begins) x = where_within(bounds.begin(m) - 16 * sub, bounds.end(m) - 16 * sub, x, all(kLowest));
      store(scores[m] + 16 * sub, x);
      top = max(top, x);
    }
    tops[m] = top;
  }
}

// One tile for M rows. What is done to all rows' scores is done step by step: while one row's numbers are on their way through a
// sum or a power, the processor has the others'.
// Not inlined: the compiler keeps more of its loops in registers so.
template <Element E, int M, bool kAhead>
__attribute__((noinline)) void attend_tile(const Problem<E>& problem, const Tile& tile, const char* queries, Bounds bounds,
                                           const char* const* next, Sums sums) {
  static_assert(M <= 16, "one number of each row has a lane");
  alignas(64) float scores[M][kTile];
  alignas(64) char weights[M][kPairs * Step<E>::kPairBytes];
  Lanes tops[M];
  for (int m = 0; m < M; m++) tops[m] = all(kLowest);
  for (int sub = tile.sub_begin / kScoredTogether * kScoredTogether; sub < tile.sub_end; sub += kScoredTogether) {
    const auto to = reinterpret_cast<float(*)[kTile]>(&scores[0][16 * sub]);
    score<E, M, kScoredTogether, kAhead>(problem, queries, tile.keys + sub, next + sub, to, tops);
  }
  int low = tile.pair_begin, high = tile.pair_end;
  bounds.narrow(M, low, high);
  if (bounds.begins || problem.call.softcap > 0) cap_and_mask<E, M>(problem, tile, bounds, scores, tops);
  bool grown = false;
  for (int m = 0; m < M; m++) grown = grown || any_more(tops[m], all(sums.maxima[m] + kHeadroom));
  alignas(64) float shrink[16];
  if (grown) {
    alignas(64) float before[16] = {}, maxima[16] = {};
    for (int m = 0; m < M; m++) {
      const float highest = max_of(tops[m]);
      before[m] = sums.maxima[m];
      sums.maxima[m] = maxima[m] = highest > before[m] ? highest : before[m];
    }
    store(shrink, exp2(load(before) - load(maxima)));
    for (int m = 0; m < M; m++) store(sums.weights + 16 * m, load(sums.weights + 16 * m) * all(shrink[m]));
  }
  for (int m = 0; m < M; m++) {
    const Lanes maximum = all(sums.maxima[m]);
    Lanes total = load(sums.weights + 16 * m);
    for (int sub = tile.sub_begin / 2 * 2; sub < tile.sub_end; sub += 2) {
      Lanes two[2];
      for (int i = 0; i < 2; i++) {
        two[i] = Step<E>::power(load(scores[m] + 16 * (sub + i)) - maximum);
        if (bounds.begins) two[i] = where_within(bounds.begin(m) - 16 * (sub + i), bounds.end(m) - 16 * (sub + i), two[i], zero());
      }
      total = Step<E>::put_two(weights[m], 16 * sub, two[0], two[1], total);
    }
    store(sums.weights + 16 * m, total);
  }
  int column = 0;
  const int columns = problem.layout.value_columns;
  for (; column + kColumnsTogether <= columns; column += kColumnsTogether)
    accumulate<E, M, kColumnsTogether, kAhead>(problem, tile, weights, grown ? shrink : nullptr, column, low, high, next, sums.values);
  for (; column < columns; column++)
    accumulate<E, M, 1, kAhead>(problem, tile, weights, grown ? shrink : nullptr, column, low, high, next, sums.values);
}

template <Element E, bool kAhead, int M>
ALWAYS_INLINE void dispatch(int rows, const Problem<E>& problem, const Tile& tile, const char* queries, Bounds bounds,
                            const char* const* next, Sums sums) {
  if (rows == M) return attend_tile<E, M, kAhead>(problem, tile, queries, bounds, next, sums);
  if constexpr (M > 1) dispatch<E, kAhead, M - 1>(rows, problem, tile, queries, bounds, next, sums);
}

// One tile for any number of rows: in parts of like size. `next`, where there is one, has the sub-tiles of the next tile.
template <Element E>
ALWAYS_INLINE void attend_rows(const Problem<E>& problem, const Tile& tile, const char* queries, int rows, Bounds bounds,
                               const char* const* next, Sums sums) {
  const int parts = (rows + kRows - 1) / kRows;
  for (int part = 0; part < parts; part++) {
    const int from = rows * part / parts, count = rows * (part + 1) / parts - from;
    const Bounds visible = bounds.from(from);
    int low = tile.pair_begin, high = tile.pair_end;
    visible.narrow(count, low, high);
    if (low >= high) continue;
    const char* q = queries + int64_t(from) * problem.query_bytes;
    const Sums own = sums.at(from, problem.value_floats);
    if (next && part == 0)
      dispatch<E, true, kRows>(count, problem, tile, q, visible, next, own);
    else
      dispatch<E, false, kRows>(count, problem, tile, q, visible, nullptr, own);
  }
}

// ------------------------------------------------------------------------------------------------ beginnings and ends

template <Element E>
void take_queries(const Problem<E>& problem, int row, int head, int rows, char* to) {
  const Strided& from = problem.call.queries;
  const int size = problem.call.layer.key_size;
  for (int r = 0; r < rows; r++) {
    for (int member = 0; member < problem.group; member++, to += problem.query_bytes) {
      const char* q = from.data + (row + r) * from.row_stride + (int64_t(head) * problem.group + member) * from.head_stride;
      int d = 0;
      for (; d + 16 <= size; d += 16) Step<E>::put(to, d, load_elements<E>(q + d * kBytes<E>));
      if (d < size) Step<E>::put(to, d, load_elements<E>(q + d * kBytes<E>, size - d));
    }
  }
}

ALWAYS_INLINE void begin_sums(const Sums& sums, int rows, int value_floats) {
  for (int row = 0; row < rows; row++) sums.maxima[row] = kLowest;
  memset(sums.weights, 0, sizeof(float) * 16 * static_cast<size_t>(rows));
  memset(sums.values, 0, sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(value_floats));
}

// Write the outputs of `rows` tokens from `row` on, of the query heads that read KV head `head`.
template <Element E>
void finish(const Problem<E>& problem, int row, int head, int rows, const Sums& sums) {
  const AttendCall& call = problem.call;
  const int size = call.layer.value_size;
  int at = 0;
  for (int r = 0; r < rows; r++) {
    for (int member = 0; member < problem.group; member++, at++) {
      const int query_head = head * problem.group + member;
      float total = sum_of(load(sums.weights + 16 * at)), factor = 1.0f;
      if (call.sinks) {
        // Of the sink and the tokens, the larger one is 1: neither overflows.
        const float sink = call.sinks[query_head] * kLog2E, maximum = sums.maxima[at];
        factor = sink > maximum ? first_of(exp2(all(maximum - sink))) : 1.0f;
        total = total * factor + (sink > maximum ? 1.0f : first_of(exp2(all(sink - maximum))));
      }
      const Lanes scale = all(factor / total);
      const float* values = sums.values + int64_t(at) * problem.value_floats;
      char* out = call.output + ((int64_t(row) + r) * call.q_heads + query_head) * size * kBytes<E>;
      for (int d = 0; d < size; d += 16) store_elements<E>(out + d * kBytes<E>, load(values + d) * scale, size - d);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------- decodes

// A place in the line of all tiles of all decodes.
template <Element E>
struct Place {
  int sequence = 0, head = 0;
  int first_seen = 0, context = 0;  // the decode sees first_seen .. context - 1
  int tile_begin = 0, tile_end = 0, tile = 0;

  static int64_t tiles(const Problem<E>& problem, int sequence) {
    const int context = problem.call.rows.context_lengths[sequence];
    return (context + kTile - 1) / kTile - problem.first_seen(context - 1) / kTile;
  }
  void enter(const Problem<E>& problem) {
    if (sequence >= problem.call.rows.decodes) return;
    context = problem.call.rows.context_lengths[sequence];
    first_seen = problem.first_seen(context - 1);
    tile = tile_begin = first_seen / kTile;
    tile_end = (context + kTile - 1) / kTile;
  }
  void seek(const Problem<E>& problem, int64_t position) {
    for (;; sequence++) {
      const int64_t own = tiles(problem, sequence), all_heads = own * problem.call.layer.kv_heads;
      if (position < all_heads) {
        enter(problem);
        head = static_cast<int>(position / own);
        tile += static_cast<int>(position % own);
        return;
      }
      position -= all_heads;
    }
  }
  void advance(const Problem<E>& problem) {
    if (++tile < tile_end) return;
    tile = tile_begin;
    if (++head < problem.call.layer.kv_heads) return;
    head = 0;
    sequence++;
    enter(problem);
  }
  Where where(const Problem<E>& problem) const {
    return {problem.call.rows.tables + sequence * problem.call.rows.table_stride, head, tile, first_seen, context};
  }
};

ALWAYS_INLINE void keep(const Slot& slot, int64_t item, const Sums& sums, int rows, int value_floats) {
  *slot.item = item;
  memcpy(slot.sums.maxima, sums.maxima, sizeof(float) * static_cast<size_t>(rows));
  memcpy(slot.sums.weights, sums.weights, sizeof(float) * 16 * static_cast<size_t>(rows));
  memcpy(slot.sums.values, sums.values, sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(value_floats));
}

template <Element E>
void attend_decodes(const Problem<E>& problem, const Memory& memory, int thread, int threads) {
  const AttendCall& call = problem.call;
  for (const Slot& slot : memory.slots) *slot.item = -1;
  int64_t total = 0;
  for (int sequence = 0; sequence < call.rows.decodes; sequence++) total += Place<E>::tiles(problem, sequence);
  total *= call.layer.kv_heads;
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  if (begin == end) return;
  Place<E> now;
  now.seek(problem, begin);
  bool whole = now.tile == now.tile_begin;  // this thread has the item from its first tile on
  bool fresh = true;
  for (int64_t position = begin; position < end; position++) {
    if (fresh) {
      take_queries<E>(problem, now.sequence, now.head, 1, memory.queries);
      begin_sums(memory.sums, problem.group, problem.value_floats);
    }
    Place<E> then = now;
    then.advance(problem);
    const bool more = position + 1 < end;
    const Where next = more ? then.where(problem) : Where{};
    Tile tile;
    find_tile<E>(call.layer, problem.layout, now.where(problem), more ? &next : nullptr, memory.scratch, tile);
    const char* ahead[kSubTiles];
    const bool look_ahead = more && problem.layout.width == kSubTile;
    if (look_ahead) find_ahead(call.layer, problem.layout, next, ahead);
    const int low = now.first_seen - tile.first, high = now.context - tile.first;
    const Bounds bounds = low > 0 || high < kTile ? Bounds{&low, &high, 0} : Bounds{};
    attend_rows<E>(problem, tile, memory.queries, problem.group, bounds, look_ahead ? ahead : nullptr, memory.sums);
    fresh = then.sequence != now.sequence || then.head != now.head;
    if (fresh && whole) {
      finish<E>(problem, now.sequence, now.head, 1, memory.sums);
    } else if (fresh || position + 1 == end) {
      const int64_t item = int64_t(now.sequence) * call.layer.kv_heads + now.head;
      keep(memory.slots[whole ? 1 : 0], item, memory.sums, problem.group, problem.value_floats);
    }
    whole = whole || fresh;
    now = then;
  }
}

// Take up what `other` has come to in `sums`.
ALWAYS_INLINE void join(const Sums& sums, const Sums& other, int rows, int value_floats) {
  for (int row = 0; row < rows; row++) {
    const Sums own = sums.at(row, value_floats), its = other.at(row, value_floats);
    const float maximum = *own.maxima > *its.maxima ? *own.maxima : *its.maxima;
    const Lanes shrink = exp2(all(*own.maxima - maximum)), grow = exp2(all(*its.maxima - maximum));
    *own.maxima = maximum;
    store(own.weights, load(own.weights) * shrink + load(its.weights) * grow);
    for (int d = 0; d < value_floats; d += 16) store(own.values + d, load(own.values + d) * shrink + load(its.values + d) * grow);
  }
}

template <Element E>
void finish_item(const Problem<E>& problem, const Slot& slot) {
  const int64_t kv_heads = problem.call.layer.kv_heads;
  finish<E>(problem, static_cast<int>(*slot.item / kv_heads), static_cast<int>(*slot.item % kv_heads), 1, slot.sums);
}

// Merge the parts of items that more than one thread had. They lie in the order of the line.
template <Element E>
void merge_parts(const AttendCall& call, int threads) {
  const Problem<E> problem(call);
  const Workspace<E> workspace(problem);
  Slot first{};
  for (int thread = 0; thread < threads; thread++) {
    const Memory memory = workspace.of(problem, thread);
    for (const Slot& slot : memory.slots) {
      if (*slot.item < 0) continue;
      if (first.item && *first.item == *slot.item) {
        join(first.sums, slot.sums, problem.group, problem.value_floats);
        continue;
      }
      if (first.item) finish_item(problem, first);
      first = slot;
    }
  }
  if (first.item) finish_item(problem, first);
}

// -------------------------------------------------------------------------------------------------------------- chunks

template <Element E>
void attend_chunk(const Problem<E>& problem, const Memory& memory, int sequence, int head, int row, int position, int tokens) {
  const AttendCall& call = problem.call;
  const int32_t* table = call.rows.tables + sequence * call.rows.table_stride;
  const int rows = tokens * problem.group, begin = problem.first_seen(position), end = position + tokens;
  take_queries<E>(problem, row, head, tokens, memory.queries);
  begin_sums(memory.sums, rows, problem.value_floats);
  const int tile_end = (end + kTile - 1) / kTile;
  for (int number = begin / kTile; number < tile_end; number++) {
    const bool more = number + 1 < tile_end;
    const Where next{table, head, number + 1, begin, end};
    Tile tile;
    find_tile<E>(call.layer, problem.layout, {table, head, number, begin, end}, more ? &next : nullptr, memory.scratch, tile);
    const char* ahead[kSubTiles];
    const bool look_ahead = more && problem.layout.width == kSubTile;
    if (look_ahead) find_ahead(call.layer, problem.layout, next, ahead);
    Bounds bounds;
    if (tile.first + kTile > position + 1 || tile.first < problem.first_seen(end - 1)) {
      for (int at = 0, token = 0; token < tokens; token++) {
        for (int member = 0; member < problem.group; member++, at++) {
          memory.begins[at] = problem.first_seen(position + token) - tile.first;
          memory.ends[at] = position + token + 1 - tile.first;
        }
      }
      bounds = {memory.begins, memory.ends, 1};
    }
    attend_rows<E>(problem, tile, memory.queries, rows, bounds, look_ahead ? ahead : nullptr, memory.sums);
  }
  finish<E>(problem, row, head, tokens, memory.sums);
}

template <Element E>
void attend_chunks(const Problem<E>& problem, const Memory& memory, int64_t* counter) {
  const AttendCall& call = problem.call;
  int64_t passed = 0;  // pieces of the sequences before this one
  int row = call.rows.decodes;
  int64_t piece = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
  for (int sequence = call.rows.decodes; sequence < call.rows.sequences; sequence++) {
    const int length = call.rows.query_lengths[sequence];
    const int64_t pieces = (length + problem.chunk_tokens - 1) / problem.chunk_tokens, own = pieces * call.layer.kv_heads;
    while (piece < passed + own) {
      // A head's last tokens come first: they see most, and nobody should be left alone with them at the end.
      const int64_t head = (piece - passed) / pieces, number = pieces - 1 - (piece - passed) % pieces;
      const int from = static_cast<int>(number) * problem.chunk_tokens;
      const int tokens = length - from < problem.chunk_tokens ? length - from : problem.chunk_tokens;
      const int position = call.rows.context_lengths[sequence] - length + from;
      attend_chunk<E>(problem, memory, sequence, static_cast<int>(head), row + from, position, tokens);
      piece = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    }
    passed += own;
    row += length;
  }
}

template <Element E>
void attend(const AttendCall& call, int thread, int threads) {
  const Problem<E> problem(call);
  const Workspace<E> workspace(problem);
  const Memory memory = workspace.of(problem, thread);
  attend_decodes<E>(problem, memory, thread, threads);
  attend_chunks<E>(problem, memory, workspace.counter());
}

template <Element E>
int64_t workspace_bytes(const AttendCall& call) {
  const Problem<E> problem(call);
  return Workspace<E>(problem).bytes(call.threads);
}

}  // namespace KILBURN_ISA
