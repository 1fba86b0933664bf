// The gradient of x, and for each channel and segment two sums: G of g, and P of g times the element's position there.
// Every thread adds to columns of its own in shared memory, [segment][thread]: no atomics, no bank conflicts, and the same
// bits every time. The position is the share (x - B_i)/d inside and u = x - B_L outside.

#define BACKWARD_UNROLL 4

// The gradients of one channel's parameters from its sums, by one warp. `sum(k)` returns (G, P) of segment k.
template <typename Sum>
__device__ void finish(const Arguments &a, int channel, const Sum &sum) {
  const int n = a.intervals, lane = threadIdx.x % 32;
  const i64 at = (i64)channel * (n + 1);
  const double left = read(a.parameters[0], channel, a.kind), right = read(a.parameters[1], channel, a.kind);
  const double2 below = sum(0), above = sum(n + 1);
  double of_left = 0.0, of_right = 0.0;
  for (int i = lane; i <= n; i += 32) {
    const double2 before = i > 0 ? sum(i) : make_double2(below.x, below.x);  // what the interval left of knot i gives it
    const double2 after = i < n ? sum(i + 1) : make_double2(above.x, 0.0);
    write(a.gradients[2], at + i, a.kind, before.y + (after.x - after.y));
    if (i < n) {
      const double rise = (double)read(a.parameters[2], at + i + 1, a.kind) - read(a.parameters[2], at + i, a.kind);
      of_left += rise * (after.y + (i - n) * after.x);
      of_right -= rise * (after.y + i * after.x);
    }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    of_left += __shfl_xor_sync(~0u, of_left, step);
    of_right += __shfl_xor_sync(~0u, of_right, step);
  }
  if (lane == 0) {
    const Bounds b(a, channel);
    const double width = b.right > b.left ? right - left : n;  // crossed bounds: no element lies inside, the sums are 0
    write(a.gradients[0], channel, a.kind, of_left / width - read(a.parameters[3], channel, a.kind) * below.x);
    write(a.gradients[1], channel, a.kind, of_right / width - read(a.parameters[4], channel, a.kind) * above.x);
    write(a.gradients[3], channel, a.kind, below.y);
    write(a.gradients[4], channel, a.kind, above.y - (right - left) * above.x);
  }
}

__device__ double2 widen(float2 pair) { return make_double2(pair.x, pair.y); }

// One element: its gradient, and its place and terms in the sums.
template <bool SUMS>
__device__ float of_element(float raw, float g, const Bounds &b, int intervals, const float *slopes, int stride, int &k, float &p) {
  float u, share;
  k = b.segment(finite(raw), intervals, u, share);
  if (SUMS) p = g * ((unsigned)(k - 1) < (unsigned)intervals ? share : u);
  return g * slopes[k * stride];
}

// A block works on one channel.
template <typename T, int W, bool SUMS>
__device__ void backward_planes(const Arguments &a) {
  extern __shared__ float2 columns[];  // [segment][thread], then the slopes
  const int segments = a.intervals + 2, threads = blockDim.x;
  float *slopes = reinterpret_cast<float *>(columns + (SUMS ? segments * threads : 0));
  const int channel = blockIdx.x % a.channels, split = blockIdx.x / a.channels;
  const Stretch stretch(a, channel, split);
  const Bounds b(a, channel);
  for (int k = threadIdx.x; k < segments; k += threads) slopes[k] = line(a, channel, k, b).x;
  float2 *mine = columns + threadIdx.x;
  if (SUMS)
    for (int k = 0; k < segments; ++k) mine[k * threads] = make_float2(0.0f, 0.0f);
  __syncthreads();
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x);
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad);
  Vector<T, W> *__restrict__ out = static_cast<Vector<T, W> *>(a.out);
  for (int i = threadIdx.x; i < stretch.count; i += BACKWARD_UNROLL * threads) {
    Vector<T, W> in[BACKWARD_UNROLL], given[BACKWARD_UNROLL];
    i64 at[BACKWARD_UNROLL];
#pragma unroll
    for (int u = 0; u < BACKWARD_UNROLL; ++u) {
      at[u] = stretch.at(i + u * threads);
      if (i + u * threads < stretch.count) in[u] = x[at[u]], given[u] = grad[at[u]];
    }
#pragma unroll
    for (int u = 0; u < BACKWARD_UNROLL; ++u) {
      if (i + u * threads >= stretch.count) break;
      float values[W], g[W];
      in[u].decode(values);
      given[u].decode(g);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        int k;
        float p;
        values[j] = of_element<SUMS>(values[j], g[j], b, a.intervals, slopes, 1, k, p);
        if (SUMS) {
          float2 pair = mine[k * threads];
          pair.x += g[j], pair.y += p;
          mine[k * threads] = pair;
        }
      }
      if (out) {
        Vector<T, W> result;
        result.encode(values);
        out[at[u]] = result;
      }
    }
  }
  if (!SUMS) return;
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int k = warp; k < segments; k += threads / 32) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int i = lane; i < threads; i += 32) sum.x += columns[k * threads + i].x, sum.y += columns[k * threads + i].y;
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      sum.x += __shfl_xor_sync(~0u, sum.x, step);
      sum.y += __shfl_xor_sync(~0u, sum.y, step);
    }
    if (lane == 0) {
      if (a.splits > 1) static_cast<float2 *>(a.partial)[(i64)blockIdx.x * segments + k] = sum;
      else columns[k * threads] = sum;
    }
  }
  if (a.splits > 1) return;
  __syncthreads();
  if (warp == 0) finish(a, channel, [&](int k) { return widen(columns[k * threads]); });
}

// A block works on a panel of `width` vectors of channels, over some rows; a thread on one vector of channels.
template <typename T, int W, bool SUMS>
__device__ void backward_rows(const Arguments &a) {
  extern __shared__ float2 columns[];  // [segment][j][thread], then the slopes, [segment][j][thread of the row]
  const int segments = a.intervals + 2, threads = blockDim.x;
  const int panel = blockIdx.x % a.panels, split = blockIdx.x / a.panels;
  const int across = threadIdx.x % a.width, down = threadIdx.x / a.width, rows = threads / a.width;
  const int stride = W * a.width;
  float *slopes = reinterpret_cast<float *>(columns + (SUMS ? segments * W * threads : 0));
  const int channel = (panel * a.width + across) * W;
  const bool active = channel < a.channels && down < rows;
  float2 *mine = columns + threadIdx.x;
  if (SUMS)
    for (int k = 0; k < segments * W; ++k) mine[k * threads] = make_float2(0.0f, 0.0f);
  Bounds b[W];
  if (active) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      b[j] = Bounds(a, channel + j);
      for (int k = down; k < segments; k += rows) slopes[k * stride + j * a.width + across] = line(a, channel + j, k, b[j]).x;
    }
  }
  __syncthreads();
  const i64 first = split * a.rows_of_split;
  const int count = active ? (int)min(a.rows_of_split, a.outer - first) : 0;
  const i64 step = a.channels / W, start = first * step + channel / W;
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x) + start;
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad) + start;
  Vector<T, W> *__restrict__ out = a.out ? static_cast<Vector<T, W> *>(a.out) + start : nullptr;
  constexpr int UNROLL = W == 1 ? 2 * BACKWARD_UNROLL : BACKWARD_UNROLL;
  for (int i = down; i < count; i += UNROLL * rows) {
    Vector<T, W> in[UNROLL], given[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (i + u * rows < count) in[u] = x[(i + u * rows) * step], given[u] = grad[(i + u * rows) * step];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (i + u * rows >= count) break;
      float values[W], g[W], p[W];
      int k[W];
      in[u].decode(values);
      given[u].decode(g);
#pragma unroll
      for (int j = 0; j < W; ++j)
        values[j] = of_element<SUMS>(values[j], g[j], b[j], a.intervals, slopes + j * a.width + across, stride, k[j], p[j]);
      if (SUMS) {  // the W columns are different ones, so all are read before the first is written
        float2 pairs[W];
#pragma unroll
        for (int j = 0; j < W; ++j) pairs[j] = mine[(k[j] * W + j) * threads];
#pragma unroll
        for (int j = 0; j < W; ++j) mine[(k[j] * W + j) * threads] = make_float2(pairs[j].x + g[j], pairs[j].y + p[j]);
      }
      if (out) {
        Vector<T, W> result;
        result.encode(values);
        out[(i + u * rows) * step] = result;
      }
    }
  }
  if (!SUMS) return;
  __syncthreads();
  for (int i = threadIdx.x; i < segments * stride; i += threads) {
    const int column = i % a.width, k = i / a.width;  // k counts segments and j
    float2 sum = columns[k * threads + column];
    for (int row = 1; row < rows; ++row) {
      const float2 other = columns[k * threads + row * a.width + column];
      sum.x += other.x, sum.y += other.y;
    }
    const int owner = (panel * a.width + column) * W + k % W;
    if (a.splits == 1) columns[k * threads + column] = sum;
    else if (owner < a.channels) static_cast<float2 *>(a.partial)[((i64)split * a.channels + owner) * segments + k / W] = sum;
  }
  if (a.splits > 1) return;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < stride; i += threads / 32) {
    const int column = i / W, j = i % W, owner = (panel * a.width + column) * W + j;
    if (owner < a.channels) finish(a, owner, [&](int k) { return widen(columns[(k * W + j) * threads + column]); });
  }
}
