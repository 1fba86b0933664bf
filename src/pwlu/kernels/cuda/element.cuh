// One element: its type in memory, its segment, its line. All other files build on these. This file includes no headers,
// because NVRTC has none. Computations run in float32, and round like pwlu/reference wherever the segment depends on it.

typedef unsigned short u16;
typedef long long i64;

// The maximum number of threads per multiprocessor.
#if __CUDA_ARCH__ == 750
#define RESIDENT_THREADS 1024
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100
#define RESIDENT_THREADS 1536
#else
#define RESIDENT_THREADS 2048
#endif

// Access shared memory by 32-bit addresses, which one multiply-add can compute. The compiler does not know which memory these
// functions access: separate them from ordinary accesses to the same memory by __syncthreads.
__device__ unsigned address_of(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }
__device__ float load(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ float2 load_pair(unsigned address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}
__device__ void store_pair(unsigned address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(address), "f"(pair.x), "f"(pair.y));
}

// Return the address, in a register: the compiler would compute it again wherever it is used.
__device__ unsigned keep(unsigned address) {
  asm volatile("" : "+r"(address));
  return address;
}

// The network of a dynamic PWLU, all float32; see pwlu/reference/dynamic.py for the shapes.
struct Network {
  const float *directions, *first, *first_bias, *second, *second_bias;
  float *state;  // means (B, F), hidden layer (B, H), coefficients (B, M, R)
  float *of_directions, *of_first, *of_first_bias, *of_second, *of_second_bias;  // gradients
  float *of_outputs, *of_hidden, *of_means;  // gradients within the network: (B, M, R) before tanh, (B, H) and (B, F)
  float *of_coefficients;  // (B, M, max(C, R)): the shares of the channels in of_outputs, if R is 1 but C is not
};

// The arguments of every kernel, in the order in which driver.py packs the addresses and plan.py the numbers. A tensor is
// (outer, channels, inner) in memory order.
struct Arguments {
  const void *x, *grad;
  void *out;  // y, or the gradient of x or z
  // forward and backward: left, right, heights (C, N+1), left_slope, right_slope; with KNOTS: knots (C, N+1) in place of left and
  // right; lookup: left, 1/d, slopes, offsets (C, N+2)
  const void *parameters[5];
  void *gradients[5];
  void *partial;  // partial sums of every block
  float *pool;  // (3, channels): count, mean, M2
  const void *residual;  // added to the normalized x
  float *norm;  // (4, channels): mean, 1/sqrt(variance + eps), scale, shift
  float *sums;  // (3, channels): sums of g_z and of g_z (x - mean), gradient of gamma
  Network network;
  float factor, eps;  // factor: momentum of the running statistics, or 1/count in norm_input and for means
  i64 outer, inner, per_channel;  // per_channel: elements per channel
  i64 of_split;  // minimum number of planes per block, or of rows per row of threads
  int channels, intervals, splits, kind;  // kind: the dtype of the parameters, 0 float32, 1 bfloat16, 2 float16
  int width, places, together, groups;  // see Panel and finish.cu
  unsigned piece, magic, shift;  // vectors per piece of a plane; division by the vectors per plane
  // With DYNAMIC: B, C, R, M, F and H of pwlu/reference/dynamic.py; the number of samples before this one, times channels.
  int samples, functions, rates, directions, features, hidden, first;
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
template <int W>
struct Vector<float, W> : FloatVector<W> {};
template <>
struct Vector<float, 1> : FloatVector<1> {};

__device__ float read(const void *array, i64 at, int kind) {
  if (kind == 0) return static_cast<const float *>(array)[at];
  const unsigned bits = static_cast<const u16 *>(array)[at];
  return kind == 1 ? Bfloat16::low(bits) : Float16::low(bits);
}

__device__ void write(void *array, i64 at, int kind, double value) {
  if (kind == 0) static_cast<float *>(array)[at] = (float)value;
  else
    static_cast<u16 *>(array)[at] = (u16)(kind == 1 ? Bfloat16::pack((float)value, 0.0f) : Float16::pack((float)value, 0.0f));
}

// Replace infinities by the largest finite numbers. NaN stays NaN.
#define LARGEST __uint_as_float(0x7f7fffffu)
__device__ float finite(float x) { return fabsf(x) > LARGEST ? copysignf(LARGEST, x) : x; }

// 1.5 * 2^23: if it is added with rounding down, the last bits of the sum are floor(t). This takes one addition.
#define MAGIC 12582912.0f
#define MAGIC_BITS 0x4b400000

// Lines are numbered 0 (left), 1..N (intervals), N + 1, and N + 2 (right). Line N + 1 is the last interval again, for x below
// B_R whose t is rounded up to N. This saves a comparison per element. With KNOTS, the line on the right is N + 1.
#define LINES(kind, intervals) ((intervals) + ((kind) & KNOTS ? 2 : 3))

// The place of an element: u = x - B_L, t = u N/(B_R - B_L), and its line, which is bits + 1 - MAGIC_BITS. With KNOTS, u and t are
// x - origin, and the line is bits. With LOOKUP, u is x.
struct Place {
  float u, t, shifted;
  __device__ unsigned bits() const { return __float_as_uint(shifted); }
};

// The parts of kernels. NORM: x is normalized first; ADD: then another tensor is added; KNOTS: the unit is non-uniform; DYNAMIC:
// the heights depend on the sample.
enum Kind { FORWARD = 1, LOOKUP = 2, MOMENTS = 4, NORM = 8, ADD = 16, SUMS = 32, KNOTS = 64, DYNAMIC = 128 };

// Return an offset such that bits * stride + offset is the address of an element's line, if line 0 is at `address`.
template <int KIND>
__device__ unsigned lines_from(unsigned address, unsigned stride) {
  return (KIND & KNOTS) ? address : address - (MAGIC_BITS - 1u) * stride;
}

// Return the function of a channel. With DYNAMIC, a channel is a sample and a channel, and all samples have the same functions.
template <int KIND>
__device__ int function_of(const Arguments &a, int channel) {
  if (!(KIND & DYNAMIC)) return channel;
  return a.functions == 1 ? 0 : (int)((unsigned)(a.first + channel) % (unsigned)a.functions);
}

// Return the place of the first coefficient of a channel with DYNAMIC. The next is a.rates further.
__device__ unsigned coefficient_of(const Arguments &a, int channel) {
  const unsigned of_sample = max(a.functions, a.rates), sample = (a.first + channel) / of_sample;
  return sample * a.directions * a.rates + (a.rates == 1 ? 0u : a.first + channel - sample * of_sample);
}

// Return the coefficients of all samples.
__device__ float *coefficients_of(const Arguments &a) { return a.network.state + (i64)a.samples * (a.features + a.hidden); }

// Read heights: that of knot k[u] of channel[u]. With DYNAMIC, mix the directions. The loads do not depend on each other.
template <int KIND, int U>
__device__ void read_heights(const Arguments &a, const int (&channel)[U], const int (&k)[U], float (&heights)[U]) {
  const int knots = a.intervals + 1;
  if (!(KIND & DYNAMIC)) {
#pragma unroll
    for (int u = 0; u < U; ++u) heights[u] = read(a.parameters[2], (i64)channel[u] * knots + k[u], a.kind);
    return;
  }
  unsigned at[U], coefficient[U];  // plan.py checks that 32 bits suffice
#pragma unroll
  for (int u = 0; u < U; ++u) {
    at[u] = function_of<KIND>(a, channel[u]) * knots + k[u], coefficient[u] = coefficient_of(a, channel[u]);
    heights[u] = static_cast<const float *>(a.parameters[2])[at[u]];
  }
  const float *coefficients = coefficients_of(a), *directions = a.network.directions;
#pragma unroll 2
  for (int m = 0; m < a.directions; ++m, coefficients += a.rates, directions += a.functions * knots) {
#pragma unroll
    for (int u = 0; u < U; ++u) heights[u] = fmaf(coefficients[coefficient[u]], directions[at[u]], heights[u]);
  }
}

// Compute z of an element. Each operation is rounded separately, as in reference.normalize.
struct Normal {
  float mean, scale, shift;

  __device__ Normal() : mean(0.0f), scale(1.0f), shift(0.0f) {}
  __device__ Normal(const Arguments &a, int channel)
      : mean(a.norm[channel]), scale(a.norm[2 * a.channels + channel]), shift(a.norm[3 * a.channels + channel]) {}

  __device__ float centred(float x) const { return __fsub_rn(x, mean); }
  __device__ float z(float x) const { return __fadd_rn(__fmul_rn(centred(x), scale), shift); }
  __device__ float z(float x, float residual) const { return __fadd_rn(z(x), residual); }
};

struct Bounds {
  float left, right, scale;  // if the interval between the bounds is empty, right equals left and scale is 1

  __device__ Bounds() : left(0.0f), right(0.0f), scale(1.0f) {}
  __device__ Bounds(const Arguments &a, int channel)
      : Bounds(read(a.parameters[0], channel, a.kind), read(a.parameters[1], channel, a.kind), a.intervals) {}
  __device__ Bounds(float l, float r, int intervals) : left(l), right(r) {
    scale = __fdiv_rn((float)intervals, __fsub_rn(right, left));
    if (!(scale > 0.0f && scale <= LARGEST)) {
      right = left;
      scale = 1.0f;
    }
  }

  // Elements whose absolute value is below this limit need no special care: nothing overflows, nothing is infinite or NaN.
  __device__ float limit() const { return left == left ? 1e30f / fmaxf(scale, 1.0f) : 0.0f; }  // 0 if left is NaN

  // Follow the rules of reference.segments.
  __device__ Place place(float x, float intervals) const {
    Place p;
    p.u = __fsub_rn(x, left);
    p.t = __fmul_rn(p.u, scale);
    p.shifted = __fadd_rd(p.t, MAGIC);
    if (x < left) p.shifted = MAGIC - 1.0f;
    if (x >= right) p.shifted = MAGIC + 1.0f + intervals;
    return p;
  }

  // The same for any x: infinity becomes the largest finite number, NaN is in interval 0.
  __device__ Place place_with_care(float raw, float intervals) const {
    const float x = finite(raw);
    Place p;
    p.u = __fsub_rn(x, left);
    p.t = finite(__fmul_rn(p.u, scale));
    p.shifted = __fadd_rd(fminf(fmaxf(p.t, 0.0f), intervals - 1.0f), MAGIC);
    if (x < left) p.shifted = MAGIC - 1.0f;
    if (x >= right) p.shifted = MAGIC + 1.0f + intervals;
    return p;
  }
};

// The origins of the lines of one channel in shared memory: the knots, and the first of them once more in front, because line 0
// ends where line 1 begins.
struct Knots {
  unsigned address, stride, count;  // of line 0, between lines, and of knots
  __device__ float origin(unsigned line) const { return load(line * stride + address); }
  __device__ float limit() const { return 1e30f; }
};

// Return what finds the line of an element of a channel. The last two arguments are for KNOTS.
template <int KIND>
__device__ auto finder(const Arguments &a, int channel, unsigned address, unsigned stride) {
  if constexpr (KIND & KNOTS) {
    return Knots{address, stride, a.intervals + 1u};
  } else if constexpr (KIND & LOOKUP) {
    Bounds b;
    b.left = read(a.parameters[0], channel, a.kind);
    b.scale = read(a.parameters[1], channel, a.kind);
    return b;
  } else {
    return Bounds(a, function_of<KIND>(a, channel));
  }
}
template <int KIND>
using Finder = decltype(finder<KIND>(Arguments(), 0, 0, 0));

// Find the line of each element with KNOTS: the number of knots that are not greater. All elements take the same steps, which
// stay within the table, whatever the knots are. With CARE, x becomes finite. With EACH, element j has its own knots; else all
// share the first ones.
template <bool CARE, bool EACH, int U, int W>
__device__ void search(const Knots *knots, float (&x)[U][W], unsigned (&found)[U][W]) {
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int j = 0; j < W; ++j) x[u][j] = CARE ? finite(x[u][j]) : x[u][j], found[u][j] = 0;
  for (unsigned count = knots[0].count, half; count > 0; count -= half) {
    half = (count + 1) / 2;
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const unsigned next = found[u][j] + half;
        if (x[u][j] >= knots[EACH ? j : 0].origin(next)) found[u][j] = next;
      }
  }
}
template <bool CARE, bool EACH, int U, int W>
__device__ void search(const Bounds *, float (&)[U][W], unsigned (&)[U][W]) {}  // Bounds need no search

// Return the place of an element, given what the search has found.
template <int KIND, bool CARE>
__device__ Place place_of(float x, const Knots &knots, float, unsigned found) {
  const float position = (KIND & (FORWARD | SUMS)) ? x - knots.origin(found) : 0.0f;
  return {position, position, __uint_as_float(found)};
}
template <int KIND, bool CARE>
__device__ Place place_of(float raw, const Bounds &b, float intervals, unsigned) {
  if (!(KIND & LOOKUP)) return CARE ? b.place_with_care(raw, intervals) : b.place(raw, intervals);
  const float x = CARE ? finite(raw) : raw, t = __fmul_rn(__fsub_rn(x, b.left), b.scale);
  return {x, t, __fadd_rd(fminf(fmaxf(t, -1.0f), intervals), MAGIC)};
}

// Return true only if all absolute values are below the limit. A NaN gives false.
template <int W>
__device__ bool are_tame(const float (&values)[W], float limit) {
  float size = fabsf(values[0]);
#pragma unroll
  for (int j = 1; j < W; ++j) size += fabsf(values[j]);
  return size < limit;
}

__device__ float2 line_inside(const Bounds &b, int k, float before, float after) {
  return make_float2((after - before) * b.scale, before - (float)(k - 1) * (after - before));
}

// Return line k as (S, P) with y = u S + P and u = x - B_L, from the heights at its ends and the outer slope on its side. In
// these coordinates the knots are not needed. `width` is B_R - B_L.
__device__ float2 line(int intervals, int k, const Bounds &b, float width, float before, float after, float slope) {
  if (k == 0) return make_float2(slope, after);
  if (k == intervals + 2) return make_float2(slope, slope == 0.0f ? before : before - width * slope);  // width may be infinite
  return line_inside(b, min(k, intervals), before, after);
}

// Return the knots before and after line k. An outer line has the same knot on both sides.
__device__ int knot_before(const Arguments &a, int k) {
  return k > a.intervals + 1 ? a.intervals : max(min(k, a.intervals) - 1, 0);
}
__device__ int knot_after(const Arguments &a, int k) { return min(k, a.intervals); }

// Return line k with KNOTS as (S, Y) with y = (x - origin) S + Y, from the knots and the heights at its ends.
__device__ float2 line(int intervals, int k, float begin, float end, float before, float after, float slope) {
  if (k == 0 || k > intervals) return make_float2(slope, before);
  return make_float2((after - before) / (end > begin ? end - begin : 1.0f), before);  // the width is 1 if there are no elements
}

__device__ float origin(const Arguments &a, int channel, int k) {
  return read(a.parameters[0], (i64)channel * (a.intervals + 1) + max(k - 1, 0), a.kind);
}

template <int KIND>
__device__ float2 line(const Arguments &a, int channel, int k, const Knots &) {
  const i64 at = (i64)channel * (a.intervals + 1);
  const int before = max(k - 1, 0), after = min(k, a.intervals);
  const float begin = read(a.parameters[0], at + before, a.kind), end = read(a.parameters[0], at + after, a.kind);
  const float from = read(a.parameters[2], at + before, a.kind), to = read(a.parameters[2], at + after, a.kind);
  return line(a.intervals, k, begin, end, from, to, read(k == 0 ? a.parameters[3] : a.parameters[4], channel, a.kind));
}

// The loads do not depend on each other, so that a warp waits only once.
template <int KIND>
__device__ float2 line(const Arguments &a, int channel, int k, const Bounds &b) {
  const int own = function_of<KIND>(a, channel), channels[2] = {channel, channel},
            ends[2] = {knot_before(a, k), knot_after(a, k)};
  float heights[2];
  read_heights<KIND>(a, channels, ends, heights);
  const float slope = read(k == 0 ? a.parameters[3] : a.parameters[4], own, a.kind);
  const float width = read(a.parameters[1], own, a.kind) - b.left;
  return line(a.intervals, k, b, width, heights[0], heights[1], slope);
}
