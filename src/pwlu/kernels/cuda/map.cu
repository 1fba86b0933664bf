// What maps x to y, collecting moments on the way if asked to: forward, lookup, moments.

enum Kind { FORWARD = 1, LOOKUP = 2, MOMENTS = 4 };
#define MAP_UNROLL 4

// Count, mean and sum of squared deviations of some of a channel's elements.
struct Moments {
  float count, mean, m2;
};

// Sums of differences from the first element a thread sees, so that a large mean costs no digits.
struct Shifted {
  float shift, sum, squares;
  __device__ void add(float x) {
    const float difference = x - shift;
    sum += difference;
    squares = fmaf(difference, difference, squares);
  }
  __device__ Moments moments(float count) const {
    if (count == 0.0f) return {0.0f, 0.0f, 0.0f};
    const float m2 = squares - sum * (sum / count);
    return {count, shift + sum / count, m2 < 0.0f ? 0.0f : m2};
  }
};

// Chan, Golub and LeVeque's rule for two parts.
__device__ Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  if (count == 0.0f) return a;
  const float difference = b.mean - a.mean, share = b.count / count;
  return {count, fmaf(difference, share, a.mean), a.m2 + b.m2 + difference * difference * a.count * share};
}

__device__ Moments merge_over_warp(Moments mine) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const Moments other = {__shfl_xor_sync(~0u, mine.count, step), __shfl_xor_sync(~0u, mine.mean, step),
                           __shfl_xor_sync(~0u, mine.m2, step)};
    mine = merge(mine, other);
  }
  return mine;
}

// y from one element; tables are strided, so that neighbouring channels of a row lie in neighbouring banks.
template <int KIND>
__device__ float value(float raw, const Bounds &b, const float2 *table, int stride, int intervals) {
  const float x = finite(raw);
  if (KIND & LOOKUP) {
    const float t = __fmul_rn(__fsub_rn(x, b.left), b.scale);
    const float shifted = __fadd_rd(fminf(fmaxf(t, -1.0f), (float)intervals), FLOOR_MAGIC);
    const float2 entry = table[(__float_as_int(shifted) - (FLOOR_BITS - 1)) * stride];
    return fmaf(x, entry.x, entry.y);
  }
  float u, share;
  const float2 entry = table[b.segment(x, intervals, u, share) * stride];
  return fmaf(u, entry.x, entry.y);
}

template <int KIND>
__device__ Bounds bounds_of(const Arguments &a, int channel) {
  if (!(KIND & LOOKUP)) return Bounds(a, channel);
  Bounds b;
  b.left = read(a.parameters[0], channel, a.kind);
  b.scale = read(a.parameters[1], channel, a.kind);
  return b;
}

template <int KIND>
__device__ float2 entry_of(const Arguments &a, int channel, int k, const Bounds &b) {
  if (!(KIND & LOOKUP)) return line(a, channel, k, b);
  const i64 at = (i64)channel * (a.intervals + 2) + k;
  return make_float2(read(a.parameters[2], at, a.kind), read(a.parameters[3], at, a.kind));
}

// A block works on one channel.
template <typename T, int W, int KIND>
__device__ void map_planes(const Arguments &a) {
  extern __shared__ float2 table[];
  __shared__ Moments of_warps[8];
  const int channel = blockIdx.x % a.channels, split = blockIdx.x / a.channels;
  const Stretch stretch(a, channel, split);
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x);
  Vector<T, W> *__restrict__ y = static_cast<Vector<T, W> *>(a.out);
  Bounds b;
  if (KIND & (FORWARD | LOOKUP)) {
    b = bounds_of<KIND>(a, channel);
    for (int k = threadIdx.x; k < a.intervals + 2; k += blockDim.x) table[k] = entry_of<KIND>(a, channel, k, b);
    __syncthreads();
  }
  Shifted shifted = {0.0f, 0.0f, 0.0f};
  int seen = 0;
  if ((KIND & MOMENTS) && threadIdx.x < stretch.count) {
    float values[W];
    x[stretch.at(threadIdx.x)].decode(values);
    shifted.shift = values[0];
  }
  for (int i = threadIdx.x; i < stretch.count; i += MAP_UNROLL * blockDim.x) {
    Vector<T, W> in[MAP_UNROLL];
    i64 at[MAP_UNROLL];
#pragma unroll
    for (int u = 0; u < MAP_UNROLL; ++u) {
      const int mine = i + u * blockDim.x;
      at[u] = stretch.at(mine);
      if (mine < stretch.count) in[u] = x[at[u]];
    }
#pragma unroll
    for (int u = 0; u < MAP_UNROLL; ++u) {
      if (i + u * blockDim.x >= stretch.count) break;
      float values[W];
      in[u].decode(values);
      if (KIND & MOMENTS) {
#pragma unroll
        for (int j = 0; j < W; ++j) shifted.add(values[j]);
        seen += W;
      }
      if (KIND & (FORWARD | LOOKUP)) {
#pragma unroll
        for (int j = 0; j < W; ++j) values[j] = value<KIND>(values[j], b, table, 1, a.intervals);
        Vector<T, W> result;
        result.encode(values);
        y[at[u]] = result;
      }
    }
  }
  if (KIND & MOMENTS) {
    const Moments of_warp = merge_over_warp(shifted.moments((float)seen));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warps[warp] = of_warp;
    __syncthreads();
    if (warp == 0) {
      const Moments of_block = merge_over_warp(lane < blockDim.x / 32 ? of_warps[lane] : Moments{0.0f, 0.0f, 0.0f});
      if (lane == 0) static_cast<Moments *>(a.partial)[blockIdx.x] = of_block;
    }
  }
}

// A block works on a panel of `width` vectors of channels, over some rows; a thread on one vector of channels.
template <typename T, int W, int KIND>
__device__ void map_rows(const Arguments &a) {
  extern __shared__ float2 table[];  // [segment][j][thread of the row], then reused for moments
  const int panel = blockIdx.x % a.panels, split = blockIdx.x / a.panels;
  const int across = threadIdx.x % a.width, down = threadIdx.x / a.width, rows = blockDim.x / a.width;
  const int stride = W * a.width;
  const int channel = (panel * a.width + across) * W;
  const bool active = channel < a.channels && down < rows;
  Bounds b[W];
  if (KIND & (FORWARD | LOOKUP)) {
    if (active) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        b[j] = bounds_of<KIND>(a, channel + j);
        for (int k = down; k < a.intervals + 2; k += rows)
          table[k * stride + j * a.width + across] = entry_of<KIND>(a, channel + j, k, b[j]);
      }
    }
    __syncthreads();
  }
  const i64 first = split * a.rows_of_split;
  const int count = active ? (int)min(a.rows_of_split, a.outer - first) : 0;
  const i64 step = a.channels / W;
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x) + first * step + channel / W;
  Vector<T, W> *__restrict__ y = static_cast<Vector<T, W> *>(a.out) + first * step + channel / W;
  Shifted shifted[W];
  int seen = 0;
  if (KIND & MOMENTS) {
    float values[W];
    if (down < count) x[down * step].decode(values);
#pragma unroll
    for (int j = 0; j < W; ++j) shifted[j] = {down < count ? values[j] : 0.0f, 0.0f, 0.0f};
  }
  for (int i = down; i < count; i += MAP_UNROLL * rows) {
    Vector<T, W> in[MAP_UNROLL];
#pragma unroll
    for (int u = 0; u < MAP_UNROLL; ++u)
      if (i + u * rows < count) in[u] = x[(i + u * rows) * step];
#pragma unroll
    for (int u = 0; u < MAP_UNROLL; ++u) {
      if (i + u * rows >= count) break;
      float values[W];
      in[u].decode(values);
      if (KIND & MOMENTS) {
#pragma unroll
        for (int j = 0; j < W; ++j) shifted[j].add(values[j]);
        ++seen;
      }
      if (KIND & (FORWARD | LOOKUP)) {
#pragma unroll
        for (int j = 0; j < W; ++j)
          values[j] = value<KIND>(values[j], b[j], table + j * a.width + across, stride, a.intervals);
        Vector<T, W> result;
        result.encode(values);
        y[(i + u * rows) * step] = result;
      }
    }
  }
  if (KIND & MOMENTS) {
    Moments *of_threads = reinterpret_cast<Moments *>(table);  // [j][thread]
    __syncthreads();
#pragma unroll
    for (int j = 0; j < W; ++j) of_threads[j * blockDim.x + threadIdx.x] = shifted[j].moments((float)seen);
    __syncthreads();
    for (int i = threadIdx.x; i < stride; i += blockDim.x) {
      const int j = i / a.width, column = i % a.width, mine = (panel * a.width + column) * W + j;
      Moments sum = of_threads[j * blockDim.x + column];
      for (int row = 1; row < rows; ++row) sum = merge(sum, of_threads[j * blockDim.x + row * a.width + column]);
      if (mine < a.channels) static_cast<Moments *>(a.partial)[(i64)split * a.channels + mine] = sum;
    }
  }
}
