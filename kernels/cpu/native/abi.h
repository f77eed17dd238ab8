// What Python and the library say to each other: plain structures, mirrored in kernels/cpu/library.py.
//
// Whoever changes one of them raises kAbi. All memory belongs to the caller; nothing here is kept after a call.
#pragma once

#include <stdint.h>

constexpr int32_t kAbi = 3;

// The dtype of a pool, and of all that is read from it, written to it or computed with it.
enum Element : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// One layer of a pool. native/layout.h says how it lies in a frame.
struct Layer {
  char* base;            // the first byte of this layer's part of frame 0
  int64_t frame_stride;  // bytes from a frame to the next
  int32_t element;
  int32_t block_size;
  int32_t kv_heads;
  int32_t key_size;
  int32_t value_size;
};

// The rows of one step, as kernels/interface.py's StepRows has them.
struct Rows {
  const int32_t* tables;           // [sequences, table_stride]
  int64_t table_stride;            // entries
  const int32_t* query_lengths;    // [sequences]
  const int32_t* context_lengths;  // [sequences]
  const int64_t* write_slots;      // [rows]
  int32_t sequences;
  int32_t decodes;
  int32_t rows;
};

// [rows, heads, size] with any row and head stride; the elements of one head lie side by side.
struct Strided {
  const char* data;
  int64_t row_stride;   // bytes
  int64_t head_stride;  // bytes
};

struct AttendCall {
  Layer layer;
  Rows rows;
  Strided queries;     // of the pool's dtype
  char* output;        // [rows, q_heads, value_size], contiguous, of the pool's dtype
  const float* sinks;  // [q_heads], or null
  char* workspace;     // kilburn_attend_workspace(call) bytes, aligned to 64
  int64_t workspace_bytes;
  int32_t q_heads;
  int32_t window;  // 0: none
  float scale;
  float softcap;  // 0: none
  int32_t threads;
};

struct WriteCall {
  Layer layer;
  Rows rows;
  Strided keys;
  Strided values;
  int32_t threads;
};

// Whole frames from one place to another: no destination twice.
struct CopyCall {
  const char* source;
  char* destination;
  int64_t source_stride;       // bytes from a frame to the next
  int64_t destination_stride;  // likewise
  int64_t frame_bytes;
  const int64_t* moves;  // [count, 2]: source frame, destination frame
  int64_t count;
  int32_t threads;
};

// The small operations, in kFloat32 or kBfloat16 where nothing else is said. The elements of a row lie side by side, rows of what is read any stride apart
// (in bytes), rows of what is written one behind the other.

// output[row] = weight input[row] + bias.
struct LinearCall {
  const char* input;   // [rows, inner]
  const char* weight;  // [outputs / 32, inner / 2] pairs of steps, rounded up: see linear.h
  const char* bias;    // [outputs], or null
  char* output;        // [rows, outputs]
  int64_t input_stride;
  int32_t element;
  int32_t rows;
  int32_t outputs;
  int32_t inner;
  int32_t wide;  // 1: the output is of float32, whatever the element
  int32_t threads;
};

// sum = input + residual; output = weight * sum / sqrt(mean of the sum's squares + epsilon). Each row may have several heads, which
// are normed one by one: `size` is a head's then, and there is no residual.
struct NormCall {
  const char* input;     // [rows, heads, size]
  const char* residual;  // [rows, size], or null: then sum is the input, and not written
  const char* weight;    // [size]
  char* output;          // [rows, heads, size]
  char* sum;             // [rows, size]
  int64_t input_stride;
  int64_t head_stride;  // of the input
  int64_t residual_stride;
  int32_t element;
  int32_t rows;
  int32_t heads;
  int32_t size;
  float epsilon;
  int32_t threads;
};

// output = silu(gate) * up.
struct GateCall {
  const char* input;  // [rows, 2 size]: gate, then up
  char* output;       // [rows, size]
  int64_t input_stride;
  int32_t element;
  int32_t rows;
  int32_t size;
  int32_t threads;
};

// The largest key_size of a RotateCall.
constexpr int kMaxTurned = 1024;

// Queries and keys turned by their rows' angles; then K and V written. In any dtype, that of the pool. The first `rotary` elements of
// a head turn, in pairs of (i, i + rotary / 2), or of (2 i, 2 i + 1) if they are interleaved.
struct RotateCall {
  WriteCall write;
  Strided queries;
  char* turned;         // [rows, q_heads, key_size]: the queries
  const char* cosines;  // [rows, rotary / 2]
  const char* sines;    // [rows, rotary / 2]
  int64_t cosine_stride;
  int64_t sine_stride;
  int32_t q_heads;
  int32_t rotary;
  int32_t interleaved;
};

// Of each row the largest element, and the first that is as large. A row that holds NaN has the maximum NaN, and no index.
struct PeaksCall {
  const char* input;  // [rows, size] float32
  float* maxima;      // [rows]
  int64_t* indexes;   // [rows]
  int64_t input_stride;
  int32_t rows;
  int32_t size;  // at least 1
  int32_t threads;
};

// One of the operations of a program, which are done in order: each reads what those before it wrote.
enum Kind : int32_t { kLinear = 0, kNorm = 1, kGate = 2, kRotate = 3, kAttend = 4 };

struct Operation {
  const void* call;  // the structure that goes with the kind
  int32_t kind;
  int32_t layer;  // told while it is done
};

// What one instruction set has to offer. Bodies of parallel regions: each is called by every thread of `threads` with its number.
struct Kernels {
  int64_t (*workspace)(const AttendCall&);
  void (*attend)(const AttendCall&, int thread, int threads);
  void (*merge)(const AttendCall&, int threads);  // after `attend`, by one thread
  void (*write)(const WriteCall&, int thread, int threads);
  void (*linear)(const LinearCall&, int thread, int threads);
  void (*rms_norm)(const NormCall&, int thread, int threads);
  void (*silu_mul)(const GateCall&, int thread, int threads);
  void (*rotate_write)(const RotateCall&, int thread, int threads);
  void (*peaks)(const PeaksCall&, int thread, int threads);
  uint64_t (*read)(const char* memory, int64_t bytes, int thread, int threads);
};
