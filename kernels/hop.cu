// The hop between two GPUs of one host: one side writes into the other's memory and stamps it; the other waits for the
// stamp. No host takes part. layout.py has the same numbers and is what the tests hold this file against.
//
// A slot, in the memory of the side that reads it:
//   [0, 8192)        a 64-byte mark for each block: flag, layer, micro-batch, rows
//   [8192, 8208)     the header line of a packed message
//   [8448, ...)      packed lines of 16 bytes: 4 bytes of payload, flag, 4 bytes of payload, flag
//   [payload, ...)   the payload as it is
// A flag is the sequence number of the message, counted on the device by both sides, never 0; the reader resets it.
// So a captured graph can be replayed as it is, and a flag that is neither 0 nor the awaited number is an error.
//
// Two ways to write a message:
//   packed: each 8-byte word brings its own flag, so neither fence nor second trip is needed; twice the bytes.
//   bulk:   payload, then for each block a system-wide fence and its mark; the reader's block takes its part at once.
//
// A slot is used in turns (request, reply, request, ...), so nobody writes what the other still reads: a side sends
// only after it has received what the other sent before.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr uint32_t kMarkBytes = 64;
constexpr uint32_t kHeaderAt = 8192;
constexpr uint32_t kLinesAt = 8448;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kUnroll = 4;

enum Code : uint32_t { kDeadline = 1, kAborted = 2, kSequence = 3, kPlace = 4, kRows = 5, kTurn = 6 };

// Counters of one slot. In each kernel one is read by all blocks and the other written by one, so there is no race.
// The peer's slot stands here and not in the launch, so that a captured graph goes on with another peer's buffers.
struct SlotState {
  uint32_t sent;
  uint32_t received;
  char* peer;  // the slot in the peer's memory
};

struct Record {
  uint32_t code, micro_batch, layer, expected, found;
};

struct Host {
  uint32_t abort;
  uint32_t unused[15];
  Record record;
};

struct Launch {
  const void* source;     // rows to send, local
  void* out;              // where received rows go, local; null: they stay in the slot (bulk)
  char* own;              // the slot in own memory
  SlotState* state;       // local
  Record* record;         // local, the first error
  Host* host;             // pinned host memory
  uint64_t* trace;        // local, times in ns at the end of each receive; null: none
  uint64_t deadline_ns;   // of each wait
  uint64_t payload_at;    // offset of the payload in a slot, bytes
  uint32_t trace_length;  // entries
  uint32_t units;         // of the message: 16 bytes each (bulk), 8 bytes each (packed)
  uint32_t blocks;
  uint32_t threads;
  uint32_t per_block;     // units
  uint32_t layer;
  uint32_t micro_batch;
  uint32_t rows;
  uint32_t initiator;     // 1: this side sends first
  uint32_t mode;          // 1 send, 2 receive, 3 both, in this order
  uint32_t packed;
  uint32_t gated;         // packed: one thread of a block waits for the message, then all take their lines
  uint32_t overlap;       // 1: may be launched while its predecessor still runs, and waits for it on the device
};

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint32_t next(uint32_t n) { return n + 1 ? n + 1 : 1; }

__device__ __forceinline__ uint32_t peek(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void stamp(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void push(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// A line's two words are each written and read as one 64-bit access: payload and flag can't be torn apart.
__device__ __forceinline__ void push_line(void* p, uint32_t a, uint32_t b, uint32_t flag) {
  const uint64_t x = (uint64_t(flag) << 32) | a, y = (uint64_t(flag) << 32) | b;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(x), "l"(y) : "memory");
}

__device__ __forceinline__ void peek_line(const void* p, uint64_t& x, uint64_t& y) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(x), "=l"(y) : "l"(p) : "memory");
}

__device__ void fail(const Launch& a, uint32_t code, uint32_t expected, uint32_t found) {
  if (atomicCAS(&a.record->code, 0u, code) != 0) return;
  a.record->micro_batch = a.host->record.micro_batch = a.micro_batch;
  a.record->layer = a.host->record.layer = a.layer;
  a.record->expected = a.host->record.expected = expected;
  a.record->found = a.host->record.found = found;
  __threadfence_system();
  stamp(&a.host->record.code, code);
}

// A wait's end other than by success. Cheap for 63 of 64 tries; host memory is read in one of 1024.
struct Patience {
  uint64_t until = 0;
  uint32_t tries = 0;
  __device__ __forceinline__ bool ends(const Launch& a, uint32_t awaited) {
    if (++tries & 63) return false;
    const uint64_t t = now_ns();
    if (until == 0) until = t + a.deadline_ns;
    if (peek(&a.record->code)) return true;
    if (t > until) {
      fail(a, kDeadline, awaited, 0);
      return true;
    }
    if ((tries & 1023) == 0 && peek(&a.host->abort)) {
      fail(a, kAborted, awaited, 0);
      return true;
    }
    return false;
  }
};

// The predecessor in the stream has ended and its writes are visible; the successor may take its place and wait.
__device__ __forceinline__ void begin() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The number of the message that a kernel sends (or sends and receives), or receives.
__device__ __forceinline__ uint32_t number(const Launch& a, bool sends) {
  const SlotState& s = *a.state;
  if (sends) return a.initiator ? next(s.received) : s.received;
  return a.initiator ? s.sent : next(s.sent);
}

// By one thread: whether it is this side's turn to do so.
__device__ bool in_turn(const Launch& a, bool sends) {
  const SlotState s = *a.state;
  const bool even = s.sent == s.received;
  const bool behind = a.initiator ? s.sent == next(s.received) : s.received == next(s.sent);
  if (sends ? (a.initiator ? even : behind) : (a.initiator ? behind : even)) return true;
  fail(a, kTurn, s.sent, s.received);
  return false;
}

__device__ bool fits(const Launch& a, uint32_t place, uint32_t rows) {
  const uint32_t expected = (a.layer << 16) | a.micro_batch;
  if (place != expected) {
    fail(a, kPlace, expected, place);
    return false;
  }
  if (rows != a.rows) {
    fail(a, kRows, a.rows, rows);
    return false;
  }
  return true;
}

__device__ void close_turn(const Launch& a, bool sends, bool receives, uint32_t n) {
  if (sends) a.state->sent = n;
  if (!receives) return;
  a.state->received = n;
  if (a.trace) a.trace[(n - 1) % a.trace_length] = now_ns();
}

__device__ bool await_line(const Launch& a, void* line, uint32_t n, uint32_t& x, uint32_t& y) {
  Patience patience;
  for (;;) {
    uint64_t v, w;
    peek_line(line, v, w);
    const uint32_t f = uint32_t(v >> 32), g = uint32_t(w >> 32);
    x = uint32_t(v);
    y = uint32_t(w);
    if (f == n && g == n) break;
    if ((f && f != n) || (g && g != n)) {
      fail(a, kSequence, n, f && f != n ? f : g);
      return false;
    }
    if (patience.ends(a, n)) return false;
  }
  push_line(line, 0, 0, 0);
  return true;
}

// By all workers of a block: wait until the block's first line is there, looked at by one thread. Tens of thousands of
// threads that look at the memory where the peer writes can hold its writes up for a millisecond, hop after hop.
__device__ bool gate(const Launch& a, uint32_t n, uint32_t workers, bool broken) {
  __shared__ uint32_t open;
  if (threadIdx.x == 0) {
    const char* line = a.own + kLinesAt + 16ull * blockIdx.x * a.per_block;
    Patience patience;
    uint64_t x, y;
    uint32_t found = 0;
    while (!broken) {
      peek_line(line, x, y);
      found = uint32_t(x >> 32);
      if (found || patience.ends(a, n)) break;
    }
    open = found;
  }
  asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
  return open != 0;
}

// The last warp is there for the header, so that no thread waits for two lines one after the other.
template <bool kSend, bool kReceive>
__global__ void __launch_bounds__(kMaxThreads) packed_hop(const Launch a) {
  begin();
  const uint32_t workers = blockDim.x - 32;
  const uint32_t n = number(a, kSend);
  char* const peer = kSend ? a.state->peer : nullptr;
  const bool broken = peek(&a.record->code) != 0;  // threads may differ: none may leave before the gate
  if (threadIdx.x >= workers) {
    if (broken || blockIdx.x != 0 || threadIdx.x != workers || !in_turn(a, kSend)) return;
    uint32_t place, rows;
    if (kSend) push_line(peer + kHeaderAt, (a.layer << 16) | a.micro_batch, a.rows, n);
    if (kReceive && !(await_line(a, a.own + kHeaderAt, n, place, rows) && fits(a, place, rows))) return;
    close_turn(a, kSend, kReceive, n);
    return;
  }
  const uint32_t first = blockIdx.x * a.per_block + threadIdx.x;
  const uint32_t last = min(a.units, (blockIdx.x + 1) * a.per_block);
  if (kSend && !broken) {
    const uint2* source = static_cast<const uint2*>(a.source);
#pragma unroll 4
    for (uint32_t i = first; i < last; i += workers) {
      const uint2 v = source[i];
      push_line(peer + kLinesAt + 16ull * i, v.x, v.y, n);
    }
  }
  if (kReceive) {
    if (a.gated && !gate(a, n, workers, broken)) return;
    if (broken) return;
    uint2* out = static_cast<uint2*>(a.out);
    for (uint32_t i = first; i < last; i += workers) {
      uint2 v;
      if (!await_line(a, a.own + kLinesAt + 16ull * i, n, v.x, v.y)) return;
      out[i] = v;
    }
  }
}

__device__ __forceinline__ void load_some(const void* source, uint32_t base, uint32_t last, uint4 (&held)[kUnroll]) {
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    const uint32_t i = base + k * blockDim.x;
    if (i < last) held[k] = static_cast<const uint4*>(source)[i];
  }
}

template <bool kSend, bool kReceive>
__global__ void __launch_bounds__(kMaxThreads) bulk_hop(const Launch a) {
  begin();
  const uint32_t first = blockIdx.x * a.per_block + threadIdx.x;
  const uint32_t last = min(a.units, (blockIdx.x + 1) * a.per_block);
  const bool leads = threadIdx.x == 0;
  char* const peer = kSend ? a.state->peer : nullptr;
  uint32_t n = 0;
  bool stop = false;
  uint4 held[kUnroll];
  if (kSend) load_some(a.source, first, last, held);
  if (leads) {
    stop = peek(&a.record->code) != 0;
    n = number(a, kSend);
    if (!stop && blockIdx.x == 0) stop = !in_turn(a, kSend);
  }
  if (__syncthreads_or(stop)) return;
  if (kSend) {
    uint4* target = reinterpret_cast<uint4*>(peer + a.payload_at);
    uint32_t* mark = reinterpret_cast<uint32_t*>(peer + blockIdx.x * kMarkBytes);
    if (leads) {
      stamp(mark + 1, a.layer << 16 | a.micro_batch);
      stamp(mark + 2, a.rows);
    }
    for (uint32_t base = first; base < last; base += kUnroll * blockDim.x) {
      if (base != first) load_some(a.source, base, last, held);
#pragma unroll
      for (uint32_t k = 0; k < kUnroll; ++k) {
        const uint32_t i = base + k * blockDim.x;
        if (i < last) push(target + i, held[k]);
      }
    }
    __syncthreads();
    if (leads) {
      __threadfence_system();
      stamp(mark, n);
    }
  }
  if (kReceive) {
    if (leads) {
      uint32_t* mark = reinterpret_cast<uint32_t*>(a.own + blockIdx.x * kMarkBytes);
      Patience patience;
      for (;;) {
        const uint32_t flag = acquire(mark);
        if (flag == n) break;
        if (flag) fail(a, kSequence, n, flag);
        if (flag || patience.ends(a, n)) {
          stop = true;
          break;
        }
      }
      if (!stop) {
        stop = !fits(a, peek(mark + 1), peek(mark + 2));
        stamp(mark, 0);
      }
    }
    if (a.out) {
      if (__syncthreads_or(stop)) return;
      const uint4* source = reinterpret_cast<const uint4*>(a.own + a.payload_at);
      uint4* out = static_cast<uint4*>(a.out);
#pragma unroll 4
      for (uint32_t i = first; i < last; i += blockDim.x) out[i] = __ldcg(source + i);
    }
  }
  if (leads && !stop && blockIdx.x == 0) close_turn(a, kSend, kReceive, n);
}

#include "rowwise.cu"

// May begin while its predecessor in the stream ends, where the launch says so.
template <typename... Arguments>
cudaError_t start(void (*kernel)(Arguments...), void* stream, const Launch& launch, const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = launch.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

// Each function returns a cudaError_t.
extern "C" {

int afd_hop_launch_bytes() { return sizeof(Launch); }

int afd_hop_rowwise_bytes() { return sizeof(Rowwise); }

const char* afd_hop_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int afd_hop_allocate(size_t bytes, void** pointer) {
  cudaError_t code = cudaMalloc(pointer, bytes);
  if (code == cudaSuccess) code = cudaMemset(*pointer, 0, bytes);
  return code == cudaSuccess ? cudaDeviceSynchronize() : code;
}

int afd_hop_free(void* pointer) { return cudaFree(pointer); }

int afd_hop_export(void* pointer, void* handle) {
  return cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), pointer);
}

int afd_hop_import(const void* handle, void** pointer) {
  cudaIpcMemHandle_t copy;
  memcpy(&copy, handle, sizeof(copy));
  return cudaIpcOpenMemHandle(pointer, copy, cudaIpcMemLazyEnablePeerAccess);
}

int afd_hop_unimport(void* pointer) { return cudaIpcCloseMemHandle(pointer); }

int afd_hop_reach(int peer_device) {
  const cudaError_t code = cudaDeviceEnablePeerAccess(peer_device, 0);
  if (code != cudaErrorPeerAccessAlreadyEnabled) return code;
  cudaGetLastError();
  return cudaSuccess;
}

int afd_hop_launch(const void* arguments, void* stream) {
  const Launch* launch = static_cast<const Launch*>(arguments);
  using Kernel = void (*)(Launch);
  static const Kernel kernels[2][3] = {{bulk_hop<true, false>, bulk_hop<false, true>, bulk_hop<true, true>},
                                       {packed_hop<true, false>, packed_hop<false, true>, packed_hop<true, true>}};
  if (launch->mode < 1 || launch->mode > 3) return cudaErrorInvalidValue;
  return start(kernels[launch->packed ? 1 : 0][launch->mode - 1], stream, *launch, *launch);
}

// `blocks` and `threads` of the launch are the grid's; `packed`, `units` and `per_block` are of the plain part.
int afd_hop_launch_rowwise(const void* arguments, const void* more, void* stream) {
  const Launch& launch = *static_cast<const Launch*>(arguments);
  const Rowwise& rowwise = *static_cast<const Rowwise*>(more);
  const RowwiseKernel kernel = rowwise.item == 0   ? rowwise_kernel<__nv_bfloat16>(launch, rowwise)
                               : rowwise.item == 1 ? rowwise_kernel<__half>(launch, rowwise)
                               : rowwise.item == 2 ? rowwise_kernel<float>(launch, rowwise)
                                                   : nullptr;
  return kernel ? start(kernel, stream, launch, launch, rowwise) : cudaErrorInvalidValue;
}

}  // extern "C"
