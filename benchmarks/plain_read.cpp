// Reads memory and does next to nothing with it: what no kernel that reads as much can be faster than.
//
// Every thread has one contiguous piece, in vectors as wide as the compiler knows for this machine (-march=native).

#include <cstddef>
#include <cstdint>

namespace {

typedef uint64_t Vector __attribute__((vector_size(64), aligned(64)));

constexpr size_t kUnroll = 4;  // independent sums: no load waits for another's addition
constexpr size_t kStep = kUnroll * sizeof(Vector);

uint64_t read_piece(const char* begin, const char* end) {
  Vector sums[kUnroll] = {};
  for (const char* at = begin; at < end; at += kStep) {
    for (size_t part = 0; part < kUnroll; part++) sums[part] ^= reinterpret_cast<const Vector*>(at)[part];
  }
  uint64_t all = 0;
  for (const Vector& sum : sums) {
    for (size_t lane = 0; lane < sizeof(Vector) / sizeof(uint64_t); lane++) all ^= sum[lane];
  }
  return all;
}

}  // namespace

// Returns the exclusive or of all words. `memory` is a multiple of 64, `bytes` of 256 times the threads.
extern "C" uint64_t plain_read(const char* memory, size_t bytes, int threads) {
  const size_t piece = bytes / threads;
  uint64_t all = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : all) schedule(static)
  for (int thread = 0; thread < threads; thread++) all ^= read_piece(memory + piece * thread, memory + piece * (thread + 1));
  return all;
}
