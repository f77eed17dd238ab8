// The kernels for one instruction set: compiled once for each, with -DKILBURN_ISA=its name and the compiler flags that go with it.
#include "attention.h"
#include "linear.h"
#include "operations.h"
#include "rotary.h"

namespace KILBURN_ISA {
namespace {

int64_t workspace_any(const AttendCall& call) {
  switch (call.layer.element) {
    case kFloat32: return workspace_bytes<kFloat32>(call);
    case kBfloat16: return workspace_bytes<kBfloat16>(call);
    default: return workspace_bytes<kFloat16>(call);
  }
}

void attend_any(const AttendCall& call, int thread, int threads) {
  switch (call.layer.element) {
    case kFloat32: return attend<kFloat32>(call, thread, threads);
    case kBfloat16: return attend<kBfloat16>(call, thread, threads);
    default: return attend<kFloat16>(call, thread, threads);
  }
}

void merge_any(const AttendCall& call, int threads) {
  switch (call.layer.element) {
    case kFloat32: return merge_parts<kFloat32>(call, threads);
    case kBfloat16: return merge_parts<kBfloat16>(call, threads);
    default: return merge_parts<kFloat16>(call, threads);
  }
}

void write_any(const WriteCall& call, int thread, int threads) {
  switch (call.layer.element) {
    case kFloat32: return write_rows<kFloat32>(call, thread, threads);
    case kBfloat16: return write_rows<kBfloat16>(call, thread, threads);
    default: return write_rows<kFloat16>(call, thread, threads);
  }
}

void linear_any(const LinearCall& call, int thread, int threads) {
  call.element == kFloat32 ? linear<kFloat32>(call, thread, threads) : linear<kBfloat16>(call, thread, threads);
}

void rms_norm_any(const NormCall& call, int thread, int threads) {
  call.element == kFloat32 ? rms_norm<kFloat32>(call, thread, threads) : rms_norm<kBfloat16>(call, thread, threads);
}

void silu_mul_any(const GateCall& call, int thread, int threads) {
  call.element == kFloat32 ? silu_mul<kFloat32>(call, thread, threads) : silu_mul<kBfloat16>(call, thread, threads);
}

void rotate_write_any(const RotateCall& call, int thread, int threads) {
  switch (call.write.layer.element) {
    case kFloat32: return rotate_write<kFloat32>(call, thread, threads);
    case kBfloat16: return rotate_write<kBfloat16>(call, thread, threads);
    default: return rotate_write<kFloat16>(call, thread, threads);
  }
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    workspace_any, attend_any, merge_any, write_any, linear_any, rms_norm_any, silu_mul_any, rotate_write_any, peaks, read,
};

}  // namespace KILBURN_ISA
