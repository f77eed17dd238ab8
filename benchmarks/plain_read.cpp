// Reads memory and does next to nothing with it: what no kernel that reads as much can be faster than.
//
// Every thread has one contiguous piece. How it goes through it makes up to 40 % of a difference, so there are two ways.
// `plain_read` is what one would write: one stream, in vectors as wide as the compiler knows for this machine (-march=native).
// `stream_read` is the fastest that was found: several streams at once, in narrow loads, which keep more lines on their way from
// memory.

#include <cstddef>
#include <cstdint>

namespace {

typedef uint64_t Wide __attribute__((vector_size(64), aligned(64)));
typedef uint64_t Narrow __attribute__((vector_size(16), aligned(16)));

// Goes through `streams` equal parts side by side, `unroll` vectors of each at a time, with a sum for each: no load waits for
// another's addition.
template <typename Vector, int streams, int unroll>
uint64_t read_piece(const char* piece, size_t bytes) {
  Vector sums[streams][unroll] = {};
  const size_t part = bytes / streams;
  for (size_t at = 0; at < part; at += unroll * sizeof(Vector)) {
    for (int stream = 0; stream < streams; stream++) {
      const Vector* from = reinterpret_cast<const Vector*>(piece + stream * part + at);
      for (int number = 0; number < unroll; number++) sums[stream][number] ^= from[number];
    }
  }
  uint64_t all = 0;
  for (const auto& stream : sums) {
    for (const Vector& sum : stream) {
      for (size_t lane = 0; lane < sizeof(Vector) / sizeof(uint64_t); lane++) all ^= sum[lane];
    }
  }
  return all;
}

template <typename Vector, int streams, int unroll>
uint64_t read_all(const char* memory, size_t bytes, int threads) {
  const size_t piece = bytes / threads;
  uint64_t all = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : all) schedule(static)
  for (int thread = 0; thread < threads; thread++) all ^= read_piece<Vector, streams, unroll>(memory + piece * thread, piece);
  return all;
}

}  // namespace

// Both return the exclusive or of all words. `memory` is a multiple of 64, `bytes` of 256 times the threads.

extern "C" uint64_t plain_read(const char* memory, size_t bytes, int threads) {
  return read_all<Wide, 1, 4>(memory, bytes, threads);
}

extern "C" uint64_t stream_read(const char* memory, size_t bytes, int threads) {
  return read_all<Narrow, 4, 4>(memory, bytes, threads);
}
