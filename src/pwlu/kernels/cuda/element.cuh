// One element: its memory types, its segment, its line. All else is built from these. No header is included, so that NVRTC
// needs none. Arithmetic is in float32 and rounds as pwlu/reference.py does wherever the segment depends on it.

typedef unsigned short u16;
typedef long long i64;

// What every kernel gets, packed by launch.py in this order. A tensor is (outer, channels, inner) in memory order.
struct Arguments {
  const void *x, *grad;
  void *out;  // y or the gradient of x; null if nobody wants that gradient
  // forward and backward: left, right, heights (C, N+1), left_slope, right_slope; lookup: left, 1/d, slopes, offsets (C, N+2)
  const void *parameters[5];
  void *gradients[5];
  void *partial;  // what every block adds to the sums: (splits, C, ...)
  void *count, *mean, *m2;
  i64 outer, inner, rows_of_split, per_channel;      // inner in vectors; rows: how many a block takes; elements of a channel
  int channels, intervals, splits, kind;             // kind: the parameters' type, 0 float32, 1 bfloat16, 2 float16
  int planes, pieces, width, panels;                 // planes: a block takes `planes` planes, or one of `pieces` of a plane
  unsigned piece_units, magic, shift, reserved;      // division by inner
};

struct Bfloat16 {
  static __device__ float low(unsigned word) { return __uint_as_float(word << 16); }
  static __device__ float high(unsigned word) { return __uint_as_float(word & 0xffff0000u); }
  static __device__ unsigned pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else  // sm_75 has no such instruction
    return round(low) | (round(high) << 16);
#endif
  }
  static __device__ unsigned round(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
};

struct Float16 {
  static __device__ float low(unsigned word) { return widen((u16)(word & 0xffffu)); }
  static __device__ float high(unsigned word) { return widen((u16)(word >> 16)); }
  static __device__ unsigned pack(float low, float high) { return narrow(low) | ((unsigned)narrow(high) << 16); }
  static __device__ float widen(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

// W consecutive elements, read and written at once.
template <typename T, int W>
struct alignas(2 * W) Vector {
  unsigned words[W / 2];
  __device__ void decode(float (&values)[W]) const {
#pragma unroll
    for (int j = 0; j < W / 2; ++j) {
      values[2 * j] = T::low(words[j]);
      values[2 * j + 1] = T::high(words[j]);
    }
  }
  __device__ void encode(const float (&values)[W]) {
#pragma unroll
    for (int j = 0; j < W / 2; ++j) words[j] = T::pack(values[2 * j], values[2 * j + 1]);
  }
};
template <typename T>
struct Vector<T, 1> {
  u16 bits;
  __device__ void decode(float (&values)[1]) const { values[0] = T::low(bits); }
  __device__ void encode(const float (&values)[1]) { bits = (u16)T::pack(values[0], 0.0f); }
};
template <int W>
struct alignas(4 * W) FloatVector {
  float elements[W];
  __device__ void decode(float (&values)[W]) const {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = elements[j];
  }
  __device__ void encode(const float (&values)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) elements[j] = values[j];
  }
};
template <int W> struct Vector<float, W> : FloatVector<W> {};
template <> struct Vector<float, 1> : FloatVector<1> {};

__device__ float read(const void *array, i64 at, int kind) {
  if (kind == 0) return static_cast<const float *>(array)[at];
  const unsigned bits = static_cast<const u16 *>(array)[at];
  return kind == 1 ? Bfloat16::low(bits) : Float16::low(bits);
}

__device__ void write(void *array, i64 at, int kind, double value) {
  if (kind == 0) static_cast<float *>(array)[at] = (float)value;
  else static_cast<u16 *>(array)[at] = (u16)(kind == 1 ? Bfloat16::pack((float)value, 0.0f) : Float16::pack((float)value, 0.0f));
}

// An infinite input counts as the largest finite number; NaN stays NaN.
__device__ float finite(float x) {
  const float largest = __uint_as_float(0x7f7fffffu);
  return fabsf(x) > largest ? copysignf(largest, x) : x;
}

// 1.5 * 2^23: added with rounding down, it leaves floor(t) in the last bits of the sum, at the price of one addition.
#define FLOOR_MAGIC 12582912.0f
#define FLOOR_BITS 0x4b400000

struct Bounds {
  float left, right, scale;  // right is left, and scale 1, where nothing lies between the bounds

  __device__ Bounds() {}
  __device__ Bounds(const Arguments &a, int channel) {
    left = read(a.parameters[0], channel, a.kind);
    right = read(a.parameters[1], channel, a.kind);
    scale = __fdiv_rn((float)a.intervals, __fsub_rn(right, left));
    if (!(scale > 0.0f && scale <= __uint_as_float(0x7f7fffffu))) {
      right = left;
      scale = 1.0f;
    }
  }

  // The segment of x, 0 (left) .. N + 1 (right), the distance u = x - B_L and, inside, the share (x - B_i)/d; x is finite or NaN.
  __device__ int segment(float x, int intervals, float &u, float &share) const {
    u = __fsub_rn(x, left);
    const float t = __fmul_rn(u, scale);
    const float shifted = __fadd_rd(fminf(fmaxf(t, 0.0f), (float)(intervals - 1)), FLOOR_MAGIC);  // NaN: interval 0
    share = t - (shifted - FLOOR_MAGIC);
    int k = __float_as_int(shifted) - (FLOOR_BITS - 1);
    if (x < left) k = 0;
    if (x >= right) k = intervals + 1;
    return k;
  }
};

// The line of segment k: y = u S + P with u = x - B_L. In these coordinates knots need not be computed.
__device__ float2 line(const Arguments &a, int channel, int k, const Bounds &b) {
  const int n = a.intervals;
  const i64 at = (i64)channel * (n + 1);
  if (k == 0) return make_float2(read(a.parameters[3], channel, a.kind), read(a.parameters[2], at, a.kind));
  if (k == n + 1) {
    const float slope = read(a.parameters[4], channel, a.kind);
    const float width = read(a.parameters[1], channel, a.kind) - b.left;
    return make_float2(slope, read(a.parameters[2], at + n, a.kind) - width * slope);
  }
  const float start = read(a.parameters[2], at + k - 1, a.kind), rise = read(a.parameters[2], at + k, a.kind) - start;
  return make_float2(rise * b.scale, start - (float)(k - 1) * rise);
}

// The planes of one channel that a block works on, as one sequence of vectors.
struct Stretch {
  i64 base, stride;
  int count;
  unsigned units, magic, shift;
  bool many;

  __device__ Stretch(const Arguments &a, int channel, int split) {
    const i64 first = (i64)(split / a.pieces) * a.planes;
    const i64 start = (i64)(split % a.pieces) * a.piece_units;
    const i64 planes = min((i64)a.planes, a.outer - first);
    const i64 length = min((i64)a.piece_units, a.inner - start);
    base = (first * a.channels + channel) * a.inner + start;
    stride = a.channels * a.inner;
    count = length > 0 ? (int)(planes * length) : 0;
    units = (unsigned)length, magic = a.magic, shift = a.shift;
    many = a.planes > 1;
  }

  // Where vector i lies.
  __device__ i64 at(unsigned i) const {
    if (!many) return base + i;
    const unsigned plane = (__umulhi(i, magic) + i) >> shift;
    return base + plane * stride + (i - plane * units);
  }
};
