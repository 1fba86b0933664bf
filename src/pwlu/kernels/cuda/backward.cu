// The gradient of x, and for each channel and line two sums: G of g, and P of g t.
// Every thread adds to columns of its own in shared memory, [line][thread]: no atomics, no bank conflicts, and the same
// bits every time.

#define ROWS_AT_ONCE 8  // vectors of a column that a thread works on at a time
#define MIXED_AT_ONCE 2

// The gradients of one channel's parameters from its sums, by one warp. `sum(k)` returns (G, P) of line k.
template <typename Sum>
__device__ void finish(const Arguments &a, int channel, const Sum &sum) {
  const int n = a.intervals, lane = threadIdx.x % 32;
  const i64 at = (i64)channel * (n + 1);
  const auto inside = [&](int i) {  // G, and P counted from knot i: the sum of g (x - B_i)/d
    double2 pair = sum(i + 1);
    if (i == n - 1) {
      const double2 more = sum(n + 1);
      pair.x += more.x, pair.y += more.y;
    }
    pair.y -= i * pair.x;
    return pair;
  };
  const Bounds b(a, channel);
  const float left_slope = read(a.parameters[3], channel, a.kind), right_slope = read(a.parameters[4], channel, a.kind);
  const double width = (double)read(a.parameters[1], channel, a.kind) - b.left;
  const bool open = b.right > b.left;  // else t is x - B_L, and no element lies inside
  const double share = open ? 1.0 / width : 0.0, step = open ? width / n : 1.0;
  const double2 below = sum(0), above = sum(n + 2);
  double of_left = 0.0, of_right = 0.0;
  for (int i = lane; i <= n; i += 32) {
    const double before = i > 0 ? inside(i - 1).y : below.x;  // what the line before knot i gives to its height
    const double2 after = i < n ? inside(i) : make_double2(above.x, 0.0);
    write(a.gradients[2], at + i, a.kind, before + (after.x - after.y));
    if (i < n) {
      const double rise = (double)read(a.parameters[2], at + i + 1, a.kind) - read(a.parameters[2], at + i, a.kind);
      of_left += rise * (after.y + (i - n) * after.x);
      of_right -= rise * (after.y + i * after.x);
    }
  }
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) {
    of_left += __shfl_xor_sync(~0u, of_left, distance);
    of_right += __shfl_xor_sync(~0u, of_right, distance);
  }
  if (lane == 0) {
    write(a.gradients[0], channel, a.kind, of_left * share - left_slope * below.x);
    write(a.gradients[1], channel, a.kind, of_right * share - right_slope * above.x);
    write(a.gradients[3], channel, a.kind, below.y * step);
    write(a.gradients[4], channel, a.kind, above.y * step - width * above.x);
  }
}

__device__ double2 widen(float2 pair) { return make_double2(pair.x, pair.y); }

// One element: the gradient of x, and what the sums need. `slopes` and `stride` as lines_from made them.
template <bool CARE>
__device__ float derivative(float x, float g, const Bounds &b, unsigned slopes, unsigned stride, float intervals, float &t,
                            unsigned &bits) {
  const Place place = CARE ? b.place_with_care(x, intervals) : b.place(x, intervals);
  t = place.t, bits = place.bits();
  return g * load(bits * stride + slopes);
}

// A vector that is not there: zeros change no sum.
template <int W>
__device__ void clear(float (&x)[W], float (&g)[W]) {
#pragma unroll
  for (int j = 0; j < W; ++j) x[j] = 0.0f, g[j] = 0.0f;
}

// U vectors of W elements, the gradients in place of x. Element j has its own bounds and slopes (EACH), or all share the first.
template <int U, int W, bool EACH>
__device__ void differentiate(float (&x)[U][W], const float (&g)[U][W], const Bounds *b, const unsigned *slopes, unsigned stride,
                              float intervals, float limit, float (&t)[U][W], unsigned (&bits)[U][W]) {
  bool tame = true;
#pragma unroll
  for (int u = 0; u < U; ++u) tame = are_tame(x[u], limit) && tame;
  if (tame) {
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < W; ++j)
        x[u][j] =
            derivative<false>(x[u][j], g[u][j], b[EACH ? j : 0], slopes[EACH ? j : 0], stride, intervals, t[u][j], bits[u][j]);
  } else {
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < W; ++j)
        x[u][j] =
            derivative<true>(x[u][j], g[u][j], b[EACH ? j : 0], slopes[EACH ? j : 0], stride, intervals, t[u][j], bits[u][j]);
  }
}

// Adds two elements to sums that may be the same ones, without waiting for the first before the second is read: then the first
// brings both.
__device__ void add_two(unsigned first, float g, float t, unsigned second, float h, float s) {
  const float2 a = load_pair(first), b = load_pair(second);
  float2 sum = make_float2(a.x + g, fmaf(g, t, a.y));
  if (first == second) sum.x += h, sum.y = fmaf(h, s, sum.y);
  store_pair(second, make_float2(b.x + h, fmaf(h, s, b.y)));
  store_pair(first, sum);
}

// Adds U vectors to a thread's columns; element j to columns[j] (EACH), or all to the first.
template <int U, int W, bool EACH>
__device__ void accumulate(const float (&g)[U][W], const float (&t)[U][W], const unsigned (&bits)[U][W], const unsigned *columns,
                           unsigned stride) {
#pragma unroll
  for (int u = 0; u < U; u += 2)
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const unsigned column = columns[EACH ? j : 0], address = bits[u][j] * stride + column;
      if (U > 1) {
        add_two(address, g[u][j], t[u][j], bits[(u + 1) % U][j] * stride + column, g[(u + 1) % U][j], t[(u + 1) % U][j]);
      } else {
        const float2 sum = load_pair(address);
        store_pair(address, make_float2(sum.x + g[u][j], fmaf(g[u][j], t[u][j], sum.y)));
      }
    }
}

// A block works on one channel, a thread on U vectors at a time: more if there are so many intervals that few threads fit.
template <typename T, int W, bool SUMS, int U>
__device__ void backward_planes(const Arguments &a) {
  extern __shared__ float2 columns[];  // [line][thread], then the slopes
  const int lines = LINES(a.intervals), threads = blockDim.x, channel = blockIdx.x;
  float *slopes = reinterpret_cast<float *>(columns + (SUMS ? lines * threads : 0));
  const Stretch<W> stretch(a);
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x);
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad);
  Vector<T, W> *__restrict__ out = static_cast<Vector<T, W> *>(a.out);
  Vector<T, W> ahead[U], given[U];  // on their way from memory while those before are worked on
  i64 at[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    at[u] = stretch.at(threadIdx.x + u * threads);
    if (threadIdx.x + u * threads < stretch.count) ahead[u] = x[at[u]], given[u] = grad[at[u]];
  }
  const Bounds b(a, channel);
  for (int k = threadIdx.x; k < lines; k += threads) slopes[k] = line(a, channel, k, b).x;
  const unsigned own = address_of(columns + threadIdx.x), stride = 8 * threads, column = lines_from(own, stride);
  if (SUMS)
    for (int k = 0; k < lines; ++k) store_pair(own + k * stride, make_float2(0.0f, 0.0f));
  __syncthreads();
  const unsigned table = lines_from(address_of(slopes), 4);
  const float intervals = (float)a.intervals, limit = b.limit();
  for (int i = threadIdx.x; i < stretch.count; i += U * threads) {
    float values[U][W], g[U][W], t[U][W];
    unsigned bits[U][W];
    i64 here[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      ahead[u].decode(values[u]);
      given[u].decode(g[u]);
      here[u] = at[u];
      if (u > 0 && i + u * threads >= stretch.count) clear(values[u], g[u]);
      const int next = i + (U + u) * threads;
      if (next < stretch.count) {
        at[u] = stretch.at(next);
        ahead[u] = x[at[u]], given[u] = grad[at[u]];
      }
    }
    differentiate<U, W, false>(values, g, &b, &table, 4, intervals, limit, t, bits);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vector<T, W> result;
      result.encode(values[u]);
      if (u == 0 || i + u * threads < stretch.count) out[here[u]] = result;
    }
    if (SUMS) accumulate<U, W, false>(g, t, bits, &column, stride);
  }
  if (!SUMS) return;
  __syncthreads();
  const auto sum_of = [&](int k, int from, int count) {  // of line k's columns, beginning at another bank for every k
    float2 sum = make_float2(0.0f, 0.0f);
    const int shift = k % count;
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float2 column = columns[k * threads + from + (i + shift < count ? i + shift : i + shift - count)];
      sum.x += column.x, sum.y += column.y;
    }
    return sum;
  };
  const float2 *totals = columns;
  int apart = threads;
  if (lines > threads) {
    for (int k = threadIdx.x; k < lines; k += threads) columns[k * threads] = sum_of(k, 0, threads);
  } else {  // several threads a line add up a part of its columns each
    const int parts = threads / lines, part = threadIdx.x / lines, length = (threads + parts - 1) / parts, from = part * length;
    float2 sum = make_float2(0.0f, 0.0f);
    if (part < parts && from < threads) sum = sum_of(threadIdx.x % lines, from, min(length, threads - from));
    __syncthreads();
    columns[threadIdx.x] = sum;  // [part][line]
    __syncthreads();
    if (threadIdx.x < lines) {
      for (int other = 1; other < parts; ++other) {
        sum.x += columns[other * lines + threadIdx.x].x;
        sum.y += columns[other * lines + threadIdx.x].y;
      }
      columns[threads + threadIdx.x] = sum;
    }
    totals = columns + threads, apart = 1;
  }
  if (a.splits > 1) {
    float2 *partial = static_cast<float2 *>(a.partial) + ((i64)blockIdx.y * gridDim.z + blockIdx.z) * lines * a.channels + channel;
    for (int k = threadIdx.x; k < lines; k += threads) partial[(i64)k * a.channels] = totals[k * apart];
    return;
  }
  __syncthreads();
  if (threadIdx.x < 32) finish(a, channel, [&](int k) { return widen(totals[k * apart]); });
}

// A block works on a panel of a row's vectors, over some rows; a thread on one vector of each, with a column for every channel of
// it.
template <typename T, int W, bool SUMS, bool MIXED>
__device__ void backward_rows(const Arguments &a) {
  constexpr int U = MIXED ? MIXED_AT_ONCE : ROWS_AT_ONCE;
  constexpr int OWN = MIXED ? (W > 1 ? 2 : 1) : W;  // columns of a thread
  extern __shared__ float2 columns[];                // [line][own column][thread], then the slopes, [line][place]
  const int lines = LINES(a.intervals), threads = blockDim.x;
  const Panel<W, MIXED> panel(a);
  const int rows = panel.rows, places = panel.places;
  const i64 stride = panel.stride;
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x) + panel.start;
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad) + panel.start;
  Vector<T, W> *__restrict__ out = static_cast<Vector<T, W> *>(a.out) + panel.start;
  Vector<T, W> ahead[U], given[U];
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u < panel.count) ahead[u] = x[u * stride], given[u] = grad[u * stride];

  float *slopes = reinterpret_cast<float *>(columns + (SUMS ? lines * OWN * threads : 0));
  float *room = SUMS ? reinterpret_cast<float *>(columns) : slopes + lines * places;  // columns are not in use yet
  Bounds b[W];
  float limit = 1e30f;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    b[j] = Bounds(a, panel.channel[j]);
    limit = fminf(limit, b[j].limit());
  }
  lines_of_panel(a, panel, room, [&](int k, int place, float2 entry) { slopes[k * places + place] = entry.x; });
  __syncthreads();
  const unsigned own_address = address_of(columns + threadIdx.x), column_bytes = 8 * OWN * threads, line_bytes = 4 * places;
  if (SUMS)
    for (int k = 0; k < lines * OWN; ++k) store_pair(own_address + k * 8 * threads, make_float2(0.0f, 0.0f));
  unsigned column[W], table[W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const int own_column = MIXED ? panel.channel[j] - panel.channel[0] : j;
    column[j] = lines_from(own_address + own_column * 8 * threads, column_bytes);
    table[j] = lines_from(address_of(slopes + panel.place[j]), line_bytes);
  }
  const float intervals = (float)a.intervals;
  for (int i = 0; i < panel.count; i += U) {
    float values[U][W], g[U][W], t[U][W];
    unsigned bits[U][W];
    x += U * stride, grad += U * stride;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      ahead[u].decode(values[u]);
      given[u].decode(g[u]);
      if (u > 0 && i + u >= panel.count) clear(values[u], g[u]);
      if (i + U + u < panel.count) ahead[u] = x[u * stride], given[u] = grad[u * stride];
    }
    differentiate<U, W, true>(values, g, b, table, line_bytes, intervals, limit, t, bits);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vector<T, W> result;
      result.encode(values[u]);
      if (u == 0 || i + u < panel.count) out[u * stride] = result;
    }
    out += U * stride;
    if (SUMS) accumulate<U, W, true>(g, t, bits, column, column_bytes);
  }
  if (!SUMS) return;
  __syncthreads();
  // The threads' columns are added up in the place of the first thread that has the channel. A warp takes the lines of 32 channels.
  const int width = a.width, inner = MIXED ? (int)a.inner : 1;
  const auto first_of = [&](int c) { return c * inner / W; };                                      // vector
  const auto own = [&](int c, int vector) { return MIXED ? (int)(vector * W < c * inner) : c % W; };  // 1: another comes first
  const int lane = threadIdx.x % 32, warps = threads / 32;
  for (int base = 0; base < panel.channels; base += 32) {
    const int c = base + lane;
    if (c >= panel.channels) continue;
    const int first = first_of(c), last = MIXED ? ((c + 1) * inner - 1) / W : first;
    for (int k = threadIdx.x / 32; k < lines; k += warps) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (int vector = first; vector <= last; ++vector) {
        const float2 *parts = columns + (k * OWN + own(c, vector)) * threads + vector;
#pragma unroll 4
        for (int row = 0; row < rows; ++row) sum.x += parts[row * width].x, sum.y += parts[row * width].y;
      }
      if (a.splits > 1)
        static_cast<float2 *>(a.partial)[((i64)blockIdx.y * lines + k) * a.channels + panel.first_channel + c] = sum;
      else columns[(k * OWN + own(c, first)) * threads + first] = sum;
    }
  }
  if (a.splits > 1) return;
  __syncthreads();
  for (int c = threadIdx.x / 32; c < panel.channels; c += threads / 32)
    finish(a, panel.first_channel + c,
           [&](int k) { return widen(columns[(k * OWN + own(c, first_of(c))) * threads + first_of(c)]); });
}
