// The library as others see it: which instruction sets there are, threads, and one entry for each operation.
//
// Compiled for any x86-64: what needs more lies behind a table of `Kernels` of the instruction set that the caller asks for.
// Arguments are what kernels/cpu/backend.py has checked; only what would write out of bounds is looked at again.
#include <sched.h>
#include <string.h>

#include "abi.h"
#define KILBURN_ISA baseline
#include "layout.h"

namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#ifdef KILBURN_HAS_AVX512_BF16
namespace avx512_bf16 {
extern const Kernels kernels;
}
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Instructions : int32_t { kAvx2 = 0, kAvx512 = 1, kAvx512Bf16 = 2 };

bool supported(int32_t instructions) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  switch (instructions) {
    case kAvx2: return avx2;
    case kAvx512: return avx512;
#ifdef KILBURN_HAS_AVX512_BF16
    case kAvx512Bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    default: return false;
  }
}

const Kernels* kernels_of(int32_t instructions) {
  if (!supported(instructions)) return nullptr;
  switch (instructions) {
    case kAvx2: return &avx2::kernels;
    case kAvx512: return &avx512::kernels;
#ifdef KILBURN_HAS_AVX512_BF16
    case kAvx512Bf16: return &avx512_bf16::kernels;
#endif
    default: return nullptr;
  }
}

// The OpenMP runtime that the process has already: torch's. A second one would fight it for the cores, so none is linked.
// GOMP_parallel is what compilers call for a parallel region; libgomp, libiomp5 and libomp all have it.
struct Runtime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*number)() = nullptr;
  int (*count)() = nullptr;
} runtime;

template <class Body>
struct Region {
  const Body& body;
  int threads;  // that came; by the first of them
};

// Call body(thread, threads) on each of at most `threads` threads; returns how many there were.
template <class Body>
int parallel(int threads, const Body& body) {
  if (threads <= 1 || !runtime.parallel) {
    body(0, 1);
    return 1;
  }
  Region<Body> region{body, 0};
  runtime.parallel(
      [](void* data) {
        auto& own = *static_cast<Region<Body>*>(data);
        const int number = runtime.number(), count = runtime.count();
        if (number == 0) own.threads = count;
        own.body(number, count);
      },
      &region, static_cast<unsigned>(threads), 0);
  return region.threads;
}

enum Status : int { kDone = 0, kUnsupported = 1, kWorkspaceTooSmall = 2 };

void begin_attending(const AttendCall& call) {
  memset(call.workspace, 0, sizeof(int64_t));  // the counter of pieces
}

// Where all threads of a region wait for one another. They spin, as it is for a fraction of a microsecond; whoever waits for long
// waits for a thread that has lost its core, and gives up its own in between.
class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const int phase = __atomic_load_n(&phase_, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&waiting_, 1, __ATOMIC_ACQ_REL) == threads) {
      __atomic_store_n(&waiting_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&phase_, phase + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&phase_, __ATOMIC_ACQUIRE) == phase; spins++) {
      __builtin_ia32_pause();
      if (spins >= kSpins) sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;  // some tens of microseconds

  alignas(64) int waiting_ = 0;
  alignas(64) int phase_ = 0;
};

// The most threads that an operation is for.
int threads_of(const Operation& operation) {
  switch (operation.kind) {
    case kLinear: return static_cast<const LinearCall*>(operation.call)->threads;
    case kNorm: return static_cast<const NormCall*>(operation.call)->threads;
    case kGate: return static_cast<const GateCall*>(operation.call)->threads;
    case kRotate: return static_cast<const RotateCall*>(operation.call)->write.threads;
    default: return static_cast<const AttendCall*>(operation.call)->threads;
  }
}

// Why an operation can't be done; kDone: it can.
Status fault_of(const Kernels& kernels, const Operation& operation) {
  const auto of = [](bool fits) { return fits ? kDone : kUnsupported; };
  switch (operation.kind) {
    case kLinear: return of(static_cast<const LinearCall*>(operation.call)->element != kFloat16);
    case kNorm: return of(static_cast<const NormCall*>(operation.call)->element != kFloat16);
    case kGate: return of(static_cast<const GateCall*>(operation.call)->element != kFloat16);
    case kRotate: return of(static_cast<const RotateCall*>(operation.call)->write.layer.key_size <= kMaxTurned);
    case kAttend: {
      const auto& call = *static_cast<const AttendCall*>(operation.call);
      return kernels.workspace(call) <= call.workspace_bytes ? kDone : kWorkspaceTooSmall;
    }
    default: return kUnsupported;
  }
}

void do_share(const Kernels& kernels, const Operation& operation, int thread, int threads) {
  switch (operation.kind) {
    case kLinear: return kernels.linear(*static_cast<const LinearCall*>(operation.call), thread, threads);
    case kNorm: return kernels.rms_norm(*static_cast<const NormCall*>(operation.call), thread, threads);
    case kGate: return kernels.silu_mul(*static_cast<const GateCall*>(operation.call), thread, threads);
    case kRotate: return kernels.rotate_write(*static_cast<const RotateCall*>(operation.call), thread, threads);
    default: return kernels.attend(*static_cast<const AttendCall*>(operation.call), thread, threads);
  }
}

}  // namespace


EXPORT int32_t kilburn_abi() { return kAbi; }

// Sizes of the structures of abi.h in their order there; 0 behind the last.
EXPORT int64_t kilburn_sizeof(int32_t structure) {
  constexpr int64_t kSizes[] = {sizeof(Layer),    sizeof(Rows),       sizeof(Strided),  sizeof(AttendCall), sizeof(WriteCall),
                                sizeof(CopyCall), sizeof(LinearCall), sizeof(NormCall), sizeof(GateCall),   sizeof(RotateCall),
                                sizeof(PeaksCall), sizeof(Operation)};
  return structure < 0 || structure >= int32_t(sizeof kSizes / sizeof *kSizes) ? 0 : kSizes[structure];
}

EXPORT int32_t kilburn_supports(int32_t instructions) { return supported(instructions); }

EXPORT void kilburn_use_threads(void* parallel_region, void* thread_number, void* thread_count) {
  memcpy(&runtime.parallel, &parallel_region, sizeof(void*));
  memcpy(&runtime.number, &thread_number, sizeof(void*));
  memcpy(&runtime.count, &thread_count, sizeof(void*));
}

// Elements of the pool's dtype that one layer takes in a frame.
EXPORT int64_t kilburn_layer_elements(const Layer* layer) {
  const baseline::Layout layout(*layer);
  return layout.head_bytes * layer->kv_heads / layout.element_bytes;
}

EXPORT int64_t kilburn_attend_workspace(int32_t instructions, const AttendCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  return kernels ? kernels->workspace(*call) : 0;
}

EXPORT int kilburn_attend(int32_t instructions, const AttendCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels) return kUnsupported;
  if (kernels->workspace(*call) > call->workspace_bytes) return kWorkspaceTooSmall;
  begin_attending(*call);
  const int threads = parallel(call->threads, [&](int thread, int count) { kernels->attend(*call, thread, count); });
  kernels->merge(*call, threads);
  return kDone;
}

EXPORT int kilburn_write(int32_t instructions, const WriteCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels) return kUnsupported;
  parallel(call->threads, [&](int thread, int count) { kernels->write(*call, thread, count); });
  return kDone;
}

EXPORT void kilburn_copy(const CopyCall* call) {
  // Cut within frames too, so that few large ones are shared out as well.
  parallel(call->threads, [&](int thread, int count) {
    const int64_t total = call->count * call->frame_bytes, end = total * (thread + 1) / count;
    for (int64_t at = total * thread / count; at < end;) {
      const int64_t move = at / call->frame_bytes, offset = at - move * call->frame_bytes;
      const int64_t left = call->frame_bytes - offset, bytes = end - at < left ? end - at : left;
      memcpy(call->destination + call->moves[2 * move + 1] * call->destination_stride + offset,
             call->source + call->moves[2 * move] * call->source_stride + offset, static_cast<size_t>(bytes));
      at += bytes;
    }
  });
}

EXPORT int kilburn_linear(int32_t instructions, const LinearCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels || call->element == kFloat16) return kUnsupported;
  parallel(call->threads, [&](int thread, int count) { kernels->linear(*call, thread, count); });
  return kDone;
}

EXPORT int kilburn_rms_norm(int32_t instructions, const NormCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels || call->element == kFloat16) return kUnsupported;
  parallel(call->threads, [&](int thread, int count) { kernels->rms_norm(*call, thread, count); });
  return kDone;
}

EXPORT int kilburn_silu_mul(int32_t instructions, const GateCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels || call->element == kFloat16) return kUnsupported;
  parallel(call->threads, [&](int thread, int count) { kernels->silu_mul(*call, thread, count); });
  return kDone;
}

EXPORT int kilburn_rotate_write(int32_t instructions, const RotateCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels || call->write.layer.key_size > kMaxTurned) return kUnsupported;
  parallel(call->write.threads, [&](int thread, int count) { kernels->rotate_write(*call, thread, count); });
  return kDone;
}

EXPORT int kilburn_peaks(int32_t instructions, const PeaksCall* call) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels) return kUnsupported;
  parallel(call->threads, [&](int thread, int count) { kernels->peaks(*call, thread, count); });
  return kDone;
}

// Do operations one after the other, in one parallel region, and tell in `layer` where they are.
EXPORT int kilburn_run(int32_t instructions, const Operation* operations, int64_t count, int32_t threads, int32_t* layer) {
  const Kernels* kernels = kernels_of(instructions);
  if (!kernels) return kUnsupported;
  for (int64_t i = 0; i < count; i++)
    if (const int fault = fault_of(*kernels, operations[i])) return fault;
  const auto prepare = [&](int64_t i) {
    if (i < count && operations[i].kind == kAttend) begin_attending(*static_cast<const AttendCall*>(operations[i].call));
  };
  prepare(0);
  Barrier barrier;
  parallel(threads, [&](int thread, int came) {
    for (int64_t i = 0; i < count; i++) {
      const Operation& operation = operations[i];
      const int most = threads_of(operation), sharing = most < came ? most : came;
      if (thread == 0) __atomic_store_n(layer, operation.layer, __ATOMIC_RELAXED);
      if (thread < sharing) do_share(*kernels, operation, thread, sharing);
      if (operation.kind == kAttend) {
        barrier.wait(came);
        if (thread == 0) kernels->merge(*static_cast<const AttendCall*>(operation.call), sharing);
      }
      if (thread == 0) prepare(i + 1);
      barrier.wait(came);
    }
  });
  return kDone;
}

// Read memory as fast as it can be, and do nothing with it: the exclusive or of its words of 8 bytes, the last filled with zeros.
EXPORT uint64_t kilburn_read(int32_t instructions, const char* memory, int64_t bytes, int32_t threads) {
  const Kernels* kernels = kernels_of(instructions);
  uint64_t found = 0;
  if (kernels) {
    parallel(threads, [&](int thread, int count) {
      __atomic_fetch_xor(&found, kernels->read(memory, bytes, thread, count), __ATOMIC_RELAXED);
    });
  }
  return found;
}
