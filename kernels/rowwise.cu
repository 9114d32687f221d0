// Part of hop.cu, which includes it within its namespace: sends that work on numbers and not on bytes.
//
// Quantised (fp8), from the initiator only. A row travels as `hidden` numbers of 8 bits (e4m3), a float32 scale for each
// 128 of them, and zeros up to a multiple of 16 bytes. A warp works on a chunk at a time, 512 numbers and their four
// scales; a block has a range of chunks, the same on both sides. Packed, these bytes are words with flags as any others,
// [kLinesAt, ...) of the slot. In bulk they lie at [wire_at, ...), and each block has its mark. The reader writes the
// rows in their dtype to `out`. reference.py says to the bit what a number becomes.
//
// Norm, from the initiator only, packed only: a block has whole rows, adds the residual, and pushes the norm's words as
// it makes them. What is in the slot then is a plain message.

// The four functions below are parts of hop.cu's kernels over again: those, whose times are known to the hundredth of a
// microsecond, compile to other code as soon as they call them.

constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kChunk = 512;
constexpr uint32_t kGroup = 128;
constexpr uint32_t kNormWords = 4;

enum Form : uint32_t { kQuantised = 1, kNorm = 2 };

struct Rowwise {
  void* residual;      // norm: rows, local, changed in place
  const void* weight;  // norm: one row
  uint64_t wire_at;    // quantised, bulk: offset of the payload in a slot, bytes
  uint32_t form;
  uint32_t item;       // 0 bfloat16, 1 float16, 2 float32
  uint32_t hidden;     // numbers of a row
  uint32_t chunks;     // quantised: of a row; the last may be shorter
  uint32_t units;      // of the message: chunks (quantised) or rows (norm)
  uint32_t per_block;  // units
  uint32_t packed;
  uint32_t gated;      // quantised, packed, receive: as in Launch
  float eps;           // norm: added to the mean square
};

// By all workers of a block: hop.cu's gate, with the line to look at.
__device__ bool gate_at(const Launch& a, uint32_t n, uint32_t workers, bool broken, const char* line) {
  __shared__ uint32_t open;
  if (threadIdx.x == 0) {
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

// By the last warp of a block: the header of a packed message.
template <bool kSend, bool kReceive>
__device__ __forceinline__ void carry_header(const Launch& a, char* peer, uint32_t n, uint32_t workers) {
  if (blockIdx.x != 0 || threadIdx.x != workers || !in_turn(a, kSend)) return;
  uint32_t place, rows;
  if (kSend) push_line(peer + kHeaderAt, (a.layer << 16) | a.micro_batch, a.rows, n);
  if (kReceive && !(await_line(a, a.own + kHeaderAt, n, place, rows) && fits(a, place, rows))) return;
  close_turn(a, kSend, kReceive, n);
}

// By the workers: what a plain packed message brings goes to `out`.
__device__ __forceinline__ void take_lines(const Launch& a, uint32_t n, uint32_t workers, bool broken) {
  const uint32_t first = blockIdx.x * a.per_block;
  if (first >= a.units) return;
  if (a.gated && !gate_at(a, n, workers, broken, a.own + kLinesAt + 16ull * first)) return;
  if (broken) return;
  const uint32_t last = min(a.units, first + a.per_block);
  uint2* out = static_cast<uint2*>(a.out);
  for (uint32_t i = first + threadIdx.x; i < last; i += workers) {
    uint2 v;
    if (!await_line(a, a.own + kLinesAt + 16ull * i, n, v.x, v.y)) return;
    out[i] = v;
  }
}

// By one thread of a block: wait for the block's mark in bulk, look at it, reset it.
__device__ __forceinline__ bool await_mark(const Launch& a, uint32_t n) {
  uint32_t* mark = reinterpret_cast<uint32_t*>(a.own + blockIdx.x * kMarkBytes);
  Patience patience;
  for (;;) {
    const uint32_t flag = acquire(mark);
    if (flag == n) break;
    if (flag) fail(a, kSequence, n, flag);
    if (flag || patience.ends(a, n)) return false;
  }
  const bool good = fits(a, peek(mark + 1), peek(mark + 2));
  stamp(mark, 0);
  return good;
}

// Four bytes of numbers, as floats and back, rounded to the nearest, ties to even.
__device__ __forceinline__ void widen(const __nv_bfloat16*, uint32_t w, float* v) {
  v[0] = __uint_as_float(w << 16);
  v[1] = __uint_as_float(w & 0xffff0000u);
}

__device__ __forceinline__ void widen(const __half*, uint32_t w, float* v) {
  v[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(w & 0xffffu)));
  v[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(w >> 16)));
}

__device__ __forceinline__ void widen(const float*, uint32_t w, float* v) { v[0] = __uint_as_float(w); }

__device__ __forceinline__ uint32_t narrow(const __nv_bfloat16*, const float* v) {
  return uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(v[1]))) << 16 |
         __bfloat16_as_ushort(__float2bfloat16_rn(v[0]));
}

__device__ __forceinline__ uint32_t narrow(const __half*, const float* v) {
  return uint32_t(__half_as_ushort(__float2half_rn(v[1]))) << 16 | __half_as_ushort(__float2half_rn(v[0]));
}

__device__ __forceinline__ uint32_t narrow(const float*, const float* v) { return __float_as_uint(v[0]); }

// kNumbers numbers of type T as they lie in memory, 16 bytes at a time.
template <typename T, uint32_t kNumbers>
struct Held {
  static constexpr uint32_t kVectors = kNumbers * sizeof(T) / 16;
  static constexpr uint32_t kPer = 4 / sizeof(T);
  uint4 vectors[kVectors];

  __device__ __forceinline__ void load(const void* from) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) vectors[i] = static_cast<const uint4*>(from)[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) vectors[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void get(float (&v)[kNumbers]) const {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      float* to = v + 4 * kPer * i;
      widen(static_cast<const T*>(nullptr), vectors[i].x, to);
      widen(static_cast<const T*>(nullptr), vectors[i].y, to + kPer);
      widen(static_cast<const T*>(nullptr), vectors[i].z, to + 2 * kPer);
      widen(static_cast<const T*>(nullptr), vectors[i].w, to + 3 * kPer);
    }
  }
  static __device__ __forceinline__ void store(void* to, const float (&v)[kNumbers]) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const float* from = v + 4 * kPer * i;
      uint4 w;
      w.x = narrow(static_cast<const T*>(nullptr), from);
      w.y = narrow(static_cast<const T*>(nullptr), from + kPer);
      w.z = narrow(static_cast<const T*>(nullptr), from + 2 * kPer);
      w.w = narrow(static_cast<const T*>(nullptr), from + 3 * kPer);
      static_cast<uint4*>(to)[i] = w;
    }
  }
};

// The scale of a group of which each of kLanes neighbouring lanes has a part. By whole warps. NaNs don't count.
template <uint32_t kLanes, uint32_t kNumbers>
__device__ __forceinline__ float group_scale(const float (&v)[kNumbers]) {
  float largest = 0;
#pragma unroll
  for (uint32_t i = 0; i < kNumbers; ++i) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
  for (uint32_t step = kLanes / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
  const float scale = __fdiv_rn(largest, 448.0f);
  return scale >= 1.17549435e-38f ? scale : 1.0f;  // the smallest normal
}

// Four numbers in 8 bits each. What is beyond the largest becomes the largest, a NaN stays one.
__device__ __forceinline__ uint32_t to_eight(const float* v, float inverse) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)),
                                                __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)),
                                                 __NV_SATFINITE, __NV_E4M3);
  return high << 16 | low;
}

__device__ __forceinline__ void from_eight(uint32_t q, float scale, float* v) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const __half2_raw two =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(q >> (16 * i) & 0xffffu), __NV_E4M3);
    v[2 * i] = __fmul_rn(__half2float(__ushort_as_half(two.x)), scale);
    v[2 * i + 1] = __fmul_rn(__half2float(__ushort_as_half(two.y)), scale);
  }
}

// Whether the record has an error, the same for all of a warp. By whole warps.
__device__ __forceinline__ bool warp_broken(const Launch& a) {
  return __any_sync(kAll, peek(&a.record->code) != 0);
}

// Like await_line, of several lines at a time: their loads overlap. A null is no line.
template <uint32_t kLines>
__device__ bool await_lines(const Launch& a, char* const (&line)[kLines], uint32_t n, uint2 (&v)[kLines]) {
  Patience patience;
  for (;;) {
    uint64_t x[kLines], y[kLines];
#pragma unroll
    for (uint32_t k = 0; k < kLines; ++k) {
      x[k] = y[k] = uint64_t(n) << 32;
      if (line[k]) peek_line(line[k], x[k], y[k]);
    }
    bool there = true;
#pragma unroll
    for (uint32_t k = 0; k < kLines; ++k) {
      const uint32_t f = uint32_t(x[k] >> 32), g = uint32_t(y[k] >> 32);
      if ((f && f != n) || (g && g != n)) {
        fail(a, kSequence, n, f && f != n ? f : g);
        return false;
      }
      there = there && f == n && g == n;
      v[k] = make_uint2(uint32_t(x[k]), uint32_t(y[k]));
    }
    if (there) break;
    if (patience.ends(a, n)) return false;
  }
#pragma unroll
  for (uint32_t k = 0; k < kLines; ++k)
    if (line[k]) push_line(line[k], 0, 0, 0);
  return true;
}

// Packed: a lane has 8 numbers of each half of a chunk, so that a warp's lines follow each other in each half. The two
// lines of the chunk's scales are its first two lanes'.
template <typename T, bool kReceive>
__global__ void __launch_bounds__(kMaxThreads) quantised_packed_hop(const Launch a, const Rowwise r) {
  begin();
  const uint32_t workers = blockDim.x - 32;
  const uint32_t n = number(a, true);
  char* const peer = a.state->peer;
  const bool broken = warp_broken(a);  // warps may differ: none may leave before the gate
  if (threadIdx.x >= workers) {
    if (!broken) carry_header<true, kReceive>(a, peer, n, workers);
    return;
  }
  // Not all warps send: none may push before all have read the number, which the reply's header moves on.
  if (kReceive) asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t end = broken ? 0 : min(r.units, (blockIdx.x + 1) * r.per_block);
  for (uint32_t u = blockIdx.x * r.per_block + threadIdx.x / 32; u < end; u += workers / 32) {
    const uint32_t row = u / r.chunks, chunk = u % r.chunks;
    const char* source = static_cast<const char*>(a.source) + uint64_t(row) * r.hidden * sizeof(T);
    char* lines = peer + kLinesAt + 16ull * row * (r.hidden / 8 + 2 * r.chunks);
    Held<T, 8> held[2];
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      const uint32_t at = chunk * kChunk + p * (kChunk / 2) + lane * 8;
      if (at < r.hidden) {
        held[p].load(source + uint64_t(at) * sizeof(T));
      } else {
        held[p].clear();
      }
    }
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      const uint32_t at = chunk * kChunk + p * (kChunk / 2) + lane * 8;
      float v[8];
      held[p].get(v);
      const float scale = group_scale<16>(v), inverse = __frcp_rn(scale);
      if (at < r.hidden) push_line(lines + 2ull * at, to_eight(v, inverse), to_eight(v + 4, inverse), n);
      const uint32_t bits = at / kGroup * kGroup < r.hidden ? __float_as_uint(scale) : 0;
      const uint32_t other = __shfl_sync(kAll, bits, 16);
      if (lane == 0) push_line(lines + 2ull * r.hidden + 16ull * (2 * chunk + p), bits, other, n);
    }
  }
  if (kReceive) take_lines(a, n, workers, broken);
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) quantised_packed_take(const Launch a, const Rowwise r) {
  begin();
  const uint32_t workers = blockDim.x - 32;
  const uint32_t n = number(a, false);
  const bool broken = warp_broken(a);
  if (threadIdx.x >= workers) {
    if (!broken) carry_header<false, true>(a, nullptr, n, workers);
    return;
  }
  const uint32_t first = blockIdx.x * r.per_block;
  const uint64_t row_lines = 16ull * (r.hidden / 8 + 2 * r.chunks);
  if (r.gated && !gate_at(a, n, workers, broken, a.own + kLinesAt + first / r.chunks * row_lines +
                                                     2ull * kChunk * (first % r.chunks)))
    return;
  if (broken) return;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t end = min(r.units, first + r.per_block);
  for (uint32_t u = first + threadIdx.x / 32; u < end; u += workers / 32) {
    const uint32_t row = u / r.chunks, chunk = u % r.chunks;
    char* lines = a.own + kLinesAt + row * row_lines;
    char* line[3];
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      const uint32_t at = chunk * kChunk + p * (kChunk / 2) + lane * 8;
      line[p] = at < r.hidden ? lines + 2ull * at : nullptr;
    }
    line[2] = lane < 2 ? lines + 2ull * r.hidden + 16ull * (2 * chunk + lane) : nullptr;
    uint2 word[3];
    const bool there = await_lines(a, line, n, word);
    if (!__all_sync(kAll, there)) return;
    char* out = static_cast<char*>(a.out) + uint64_t(row) * r.hidden * sizeof(T);
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      const uint32_t at = chunk * kChunk + p * (kChunk / 2) + lane * 8;
      const uint32_t low = __shfl_sync(kAll, word[2].x, p), high = __shfl_sync(kAll, word[2].y, p);
      const float scale = __uint_as_float(lane < 16 ? low : high);
      float v[8];
      from_eight(word[p].x, scale, v);
      from_eight(word[p].y, scale, v + 4);
      if (at < r.hidden) Held<T, 8>::store(out + uint64_t(at) * sizeof(T), v);
    }
  }
}

// In bulk a lane has 16 neighbouring numbers, which are 16 bytes on the way. The next chunk is loaded before this one's
// numbers are used.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) quantised_bulk_send(const Launch a, const Rowwise r) {
  begin();
  const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const uint32_t end = min(r.units, (blockIdx.x + 1) * r.per_block);
  const bool leads = threadIdx.x == 0;
  const uint64_t row_bytes = r.hidden + 16ull * r.chunks;
  const auto load = [&](uint32_t u, Held<T, 16>& held) {
    const uint32_t at = u % r.chunks * kChunk + lane * 16;
    if (u < end && at < r.hidden) {
      held.load(static_cast<const char*>(a.source) + (uint64_t(u / r.chunks) * r.hidden + at) * sizeof(T));
    } else {
      held.clear();
    }
  };
  uint32_t u = blockIdx.x * r.per_block + threadIdx.x / 32;
  Held<T, 16> held;
  load(u, held);
  char* const peer = a.state->peer;
  uint32_t n = 0;
  bool stop = false;
  if (leads) {
    stop = peek(&a.record->code) != 0;
    n = number(a, true);
    if (!stop && blockIdx.x == 0) stop = !in_turn(a, true);
  }
  if (__syncthreads_or(stop)) return;
  uint32_t* mark = reinterpret_cast<uint32_t*>(peer + blockIdx.x * kMarkBytes);
  if (leads) {
    stamp(mark + 1, a.layer << 16 | a.micro_batch);
    stamp(mark + 2, a.rows);
  }
  for (; u < end; u += warps) {
    Held<T, 16> following;
    load(u + warps, following);
    const uint32_t row = u / r.chunks, chunk = u % r.chunks, at = chunk * kChunk + lane * 16;
    char* target = peer + r.wire_at + row * row_bytes;
    float v[16];
    held.get(v);
    const float scale = group_scale<8>(v), inverse = __frcp_rn(scale);
    if (at < r.hidden) {
      push(reinterpret_cast<uint4*>(target + at), make_uint4(to_eight(v, inverse), to_eight(v + 4, inverse),
                                                             to_eight(v + 8, inverse), to_eight(v + 12, inverse)));
    }
    const uint32_t bits = at / kGroup * kGroup < r.hidden ? __float_as_uint(scale) : 0;
    uint4 scales;
    scales.x = bits;
    scales.y = __shfl_sync(kAll, bits, 8);
    scales.z = __shfl_sync(kAll, bits, 16);
    scales.w = __shfl_sync(kAll, bits, 24);
    if (lane == 0) push(reinterpret_cast<uint4*>(target + r.hidden + 16ull * chunk), scales);
    held = following;
  }
  __syncthreads();
  if (leads) {
    __threadfence_system();
    stamp(mark, n);
    if (blockIdx.x == 0) close_turn(a, true, false, n);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) quantised_bulk_take(const Launch a, const Rowwise r) {
  begin();
  const bool leads = threadIdx.x == 0;
  uint32_t n = 0;
  bool stop = false;
  if (leads) {
    stop = peek(&a.record->code) != 0;
    n = number(a, false);
    if (!stop && blockIdx.x == 0) stop = !in_turn(a, false);
    if (!stop) stop = !await_mark(a, n);
  }
  if (__syncthreads_or(stop)) return;
  const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const uint32_t end = min(r.units, (blockIdx.x + 1) * r.per_block);
  const uint64_t row_bytes = r.hidden + 16ull * r.chunks;
  const auto load = [&](uint32_t u, uint4& numbers, float& scale) {
    const uint32_t chunk = u % r.chunks, at = chunk * kChunk + lane * 16;
    if (u >= end || at >= r.hidden) return;
    const char* from = a.own + r.wire_at + u / r.chunks * row_bytes;
    numbers = __ldcg(reinterpret_cast<const uint4*>(from + at));
    scale = __ldcg(reinterpret_cast<const float*>(from + r.hidden) + at / kGroup);
  };
  uint32_t u = blockIdx.x * r.per_block + threadIdx.x / 32;
  uint4 numbers = make_uint4(0, 0, 0, 0);
  float scale = 0;
  load(u, numbers, scale);
  for (; u < end; u += warps) {
    uint4 following = numbers;
    float following_scale = scale;
    load(u + warps, following, following_scale);
    const uint32_t at = u % r.chunks * kChunk + lane * 16;
    float v[16];
    from_eight(numbers.x, scale, v);
    from_eight(numbers.y, scale, v + 4);
    from_eight(numbers.z, scale, v + 8);
    from_eight(numbers.w, scale, v + 12);
    if (at < r.hidden) {
      Held<T, 16>::store(static_cast<char*>(a.out) + (uint64_t(u / r.chunks) * r.hidden + at) * sizeof(T), v);
    }
    numbers = following;
    scale = following_scale;
  }
  if (leads && blockIdx.x == 0) close_turn(a, false, true, n);
}

// By all workers of a block: the sum of their values, the same for each of them.
__device__ __forceinline__ float block_sum(float v, uint32_t workers) {
  __shared__ float parts[32];
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t step = 16; step; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  if (lane == 0) parts[threadIdx.x / 32] = v;
  asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
  v = lane < workers / 32 ? parts[lane] : 0;
#pragma unroll
  for (uint32_t step = 16; step; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}

template <typename T, bool kReceive>
__global__ void __launch_bounds__(kMaxThreads) norm_hop(const Launch a, const Rowwise r) {
  constexpr uint32_t kPer = 4 / sizeof(T);
  const T* const kind = nullptr;
  begin();
  const uint32_t workers = blockDim.x - 32;
  const uint32_t n = number(a, true);
  char* const peer = a.state->peer;
  const bool broken = warp_broken(a);  // warps may differ: none may leave before the last barrier
  if (threadIdx.x >= workers) {
    if (!broken) carry_header<true, kReceive>(a, peer, n, workers);
    return;
  }
  const uint32_t words = r.hidden * sizeof(T) / 8;
  const uint32_t first = blockIdx.x * r.per_block, end = min(r.units, first + r.per_block);
  for (uint32_t row = first; row < end; ++row) {
    const uint2* hidden = static_cast<const uint2*>(a.source) + uint64_t(row) * words;
    uint2* residual = static_cast<uint2*>(r.residual) + uint64_t(row) * words;
    float v[kNormWords][2 * kPer];
    uint2 weight[kNormWords];
    float squares = 0;
#pragma unroll
    for (uint32_t k = 0; k < kNormWords; ++k) {
      const uint32_t i = k * workers + threadIdx.x;
      if (i >= words) continue;
      const uint2 x = hidden[i], y = residual[i];
      weight[k] = static_cast<const uint2*>(r.weight)[i];
      float other[2 * kPer];
      widen(kind, x.x, v[k]);
      widen(kind, x.y, v[k] + kPer);
      widen(kind, y.x, other);
      widen(kind, y.y, other + kPer);
#pragma unroll
      for (uint32_t j = 0; j < 2 * kPer; ++j) {
        v[k][j] = __fadd_rn(v[k][j], other[j]);
        squares = fmaf(v[k][j], v[k][j], squares);
      }
      if (!broken) residual[i] = make_uint2(narrow(kind, v[k]), narrow(kind, v[k] + kPer));
    }
    if (row != first) asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");  // the last row's sum has been read
    const float factor = rsqrtf(__fdiv_rn(block_sum(squares, workers), float(r.hidden)) + r.eps);
#pragma unroll
    for (uint32_t k = 0; k < kNormWords; ++k) {
      const uint32_t i = k * workers + threadIdx.x;
      if (i >= words) continue;
      uint32_t made[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        float x[kPer], w[kPer];
#pragma unroll
        for (uint32_t j = 0; j < kPer; ++j) x[j] = __fmul_rn(v[k][h * kPer + j], factor);
        widen(kind, narrow(kind, x), x);  // rounded to the dtype before the weight
        widen(kind, h ? weight[k].y : weight[k].x, w);
#pragma unroll
        for (uint32_t j = 0; j < kPer; ++j) x[j] = __fmul_rn(x[j], w[j]);
        made[h] = narrow(kind, x);
      }
      if (!broken) push_line(peer + kLinesAt + 16ull * (uint64_t(row) * words + i), made[0], made[1], n);
    }
  }
  if (kReceive) take_lines(a, n, workers, broken);
}

using RowwiseKernel = void (*)(Launch, Rowwise);

// The kernel for rows of T; null where there is none.
template <typename T>
RowwiseKernel rowwise_kernel(const Launch& a, const Rowwise& r) {
  const bool sends = a.mode == 1, both = a.mode == 3 && a.packed && r.packed;
  if (r.form == kNorm) return sends ? norm_hop<T, false> : both ? norm_hop<T, true> : nullptr;
  if (r.form != kQuantised) return nullptr;
  if (a.mode == 2) return r.packed ? quantised_packed_take<T> : quantised_bulk_take<T>;
  if (both) return quantised_packed_hop<T, true>;
  if (!sends) return nullptr;
  return r.packed ? quantised_packed_hop<T, false> : quantised_bulk_send<T>;
}
