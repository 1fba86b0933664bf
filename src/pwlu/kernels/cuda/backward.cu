// Compute the gradient of x, and two sums per channel and line: G = sum of g, and P = sum of g t. With a norm (NORM) there are
// two passes. The first (SUMS) also adds up g_z and g_z (x - mean) and, with ADD, writes g_z. The second writes the gradient of
// x. Every thread adds to its own columns in shared memory, [line][thread]. So there are no atomics and no bank conflicts, and
// the results are bitwise reproducible.

#define ROWS_AT_ONCE 8  // vectors of a column that a thread processes at a time
#define MIXED_AT_ONCE 2

// Compute the gradients of the parameters of one channel with KNOTS, by one warp. P of line k is the sum of g (x - origin).
template <typename Sum>
__device__ void finish_knots(const Arguments &a, int channel, const Sum &sum) {
  const int n = a.intervals, lane = threadIdx.x % 32;
  const i64 at = (i64)channel * (n + 1);
  const auto knot = [&](int i) { return (double)read(a.parameters[0], at + i, a.kind); };
  const auto height = [&](int i) { return (double)read(a.parameters[2], at + i, a.kind); };
  const auto width = [&](int k) { return knot(k) > knot(k - 1) ? knot(k) - knot(k - 1) : 1.0; };  // of line k
  const auto slope = [&](int k) { return (height(k) - height(k - 1)) / width(k); };
  for (int i = lane; i <= n; i += 32) {  // the lines before and after knot i have shares of it
    const double before = i > 0 ? sum(i).y / width(i) : sum(0).x;
    const double after = i < n ? sum(i + 1).x - sum(i + 1).y / width(i + 1) : sum(n + 1).x;
    const double slope_before = i > 0 ? slope(i) : read(a.parameters[3], channel, a.kind);
    const double slope_after = i < n ? slope(i + 1) : read(a.parameters[4], channel, a.kind);
    write(a.gradients[2], at + i, a.kind, before + after);
    write(a.gradients[0], at + i, a.kind, -slope_before * before - slope_after * after);
  }
  if (lane == 0) {
    write(a.gradients[3], channel, a.kind, sum(0).y);
    write(a.gradients[4], channel, a.kind, sum(n + 1).y);
  }
}

// Compute the gradients of the parameters of one channel from its sums, by one warp. `sum(k)` returns (G, P) of line k. With
// DYNAMIC, these are sums over all samples, and sum(k, m) returns those with the m-th coefficient of each sample as a factor.
template <int KIND, typename Sum>
__device__ void finish(const Arguments &a, int channel, const Sum &sum) {
  if (KIND & KNOTS) {
    finish_knots(a, channel, sum);
    return;
  }
  const int n = a.intervals, lane = threadIdx.x % 32, own = function_of<KIND>(a, channel);
  const i64 at = (i64)channel * (n + 1);
  const Bounds b(a, own);
  const float left_slope = read(a.parameters[3], own, a.kind), right_slope = read(a.parameters[4], own, a.kind);
  const double width = (double)read(a.parameters[1], own, a.kind) - b.left;
  const bool open = b.right > b.left;  // else t is x - B_L, and there are no elements inside
  const double share = open ? 1.0 / width : 0.0, step = open ? width / n : 1.0;
  const double2 below = sum(0), above = sum(n + 2);
  double of_left = 0.0, of_right = 0.0;
  // Write the gradient of heights, and add their contributions to those of the bounds.
  const auto finish_heights = [&](const void *heights, void *gradient, int member) {
    const auto total = [&](int k) {
      if constexpr (KIND & DYNAMIC) return sum(k, member);
      else return sum(k);
    };
    const auto inside = [&](int i) {  // G, and P relative to knot i: the sum of g (x - B_i)/d
      double2 pair = total(i + 1);
      if (i == n - 1) {
        const double2 more = total(n + 1);
        pair.x += more.x, pair.y += more.y;
      }
      pair.y -= i * pair.x;
      return pair;
    };
    for (int i = lane; i <= n; i += 32) {
      const double before = i > 0 ? inside(i - 1).y : total(0).x;  // contribution of the line before knot i to its height
      const double2 after = i < n ? inside(i) : make_double2(total(n + 2).x, 0.0);
      write(gradient, at + i, a.kind, before + (after.x - after.y));
      if (i < n) {
        const i64 from = (i64)own * (n + 1) + i;
        const double rise = (double)read(heights, from + 1, a.kind) - read(heights, from, a.kind);
        of_left += rise * (after.y + (i - n) * after.x);
        of_right -= rise * (after.y + i * after.x);
      }
    }
  };
  finish_heights(a.parameters[2], a.gradients[2], 0);
  if constexpr (KIND & DYNAMIC) {
    const i64 of_direction = (i64)a.functions * (n + 1), of_gradient = (i64)max(a.functions, a.rates) * (n + 1);
    for (int m = 0; m < a.directions; ++m)
      finish_heights(a.network.directions + m * of_direction, a.network.of_directions + m * of_gradient, m + 1);
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
    if (a.sums) {
      const double2 norm_sum = sum(n + 3);
      a.sums[channel] = (float)norm_sum.x;
      a.sums[a.channels + channel] = (float)norm_sum.y;
      a.sums[2 * a.channels + channel] = (float)(norm_sum.y * a.norm[a.channels + channel]);
    }
  }
}

__device__ double2 widen(float2 pair) { return make_double2(pair.x, pair.y); }

// The number of lines in the column of a thread. The sums of a norm take one more line.
#define SUM_LINES(kind, intervals) (LINES(kind, intervals) + ((kind) & NORM ? 1 : 0))

// The options of a kernel: what it reads and computes. With ADD, the second pass reads g_z, which the first pass has written.
template <int KIND>
struct Pass {
  static constexpr bool sums = KIND & SUMS, norm = KIND & NORM;
  static constexpr bool reads_residual = sums && (KIND & ADD), slopes = sums || !(KIND & ADD);
  static constexpr bool writes = !(sums && norm) || (KIND & ADD);
};

// The norm of a channel in the backward pass: two sums in the first pass, the gradient of x in the second.
struct NormBackward : Normal {
  float g_term, centred_term;

  __device__ NormBackward() : g_term(0.0f), centred_term(0.0f) {}
  __device__ NormBackward(const Arguments &a, int channel, bool sums) : Normal(a, channel), g_term(0.0f), centred_term(0.0f) {
    if (sums || !a.sums) return;  // without sums, mean and variance are constants
    const float inv_std = a.norm[a.channels + channel];
    g_term = a.sums[channel] * a.factor;
    centred_term = a.sums[a.channels + channel] * a.factor * inv_std * inv_std;
  }

  __device__ void add(float g_z, float centred) { g_term += g_z, centred_term = fmaf(g_z, centred, centred_term); }
  __device__ float input(float g_z, float centred) const { return scale * (g_z - g_term - centred * centred_term); }
};

// Replace x by its gradient (that of z with a norm), and return t and the bits of the line for the sums. `slopes` holds results
// of lines_from with this `stride`.
template <int KIND, bool CARE, int U, int W, bool EACH>
__device__ void derivatives(float (&x)[U][W], const float (&g)[U][W], const Finder<KIND> *b, const unsigned *slopes,
                            unsigned stride, float intervals, float (&t)[U][W], unsigned (&bits)[U][W]) {
  unsigned found[U][W];
  search<CARE, EACH>(b, x, found);
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const int own = EACH ? j : 0;
      const Place place = place_of<KIND, CARE>(x[u][j], b[own], intervals, found[u][j]);
      t[u][j] = place.t, bits[u][j] = place.bits();
      x[u][j] = g[u][j] * load(bits[u][j] * stride + slopes[own]);
    }
}

// Replace x by its gradients, in U vectors of W elements. With EACH, element j has its own norm, bounds and slopes; else all
// elements share the first ones.
template <int KIND, int U, int W, bool EACH>
__device__ void differentiate(float (&x)[U][W], const float (&g)[U][W], const float (&residual)[U][W], NormBackward *norm,
                              const Finder<KIND> *b, const unsigned *slopes, unsigned stride, float intervals, float limit,
                              float (&t)[U][W], unsigned (&bits)[U][W]) {
  float centred[U][W];
  bool tame = true;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (Pass<KIND>::norm) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const Normal &own = norm[EACH ? j : 0];
        centred[u][j] = own.centred(x[u][j]);
        x[u][j] = Pass<KIND>::reads_residual ? own.z(x[u][j], residual[u][j]) : own.z(x[u][j]);
      }
    }
    tame = are_tame(x[u], limit) && tame;
  }
  if (Pass<KIND>::slopes) {
    if (tame) derivatives<KIND, false, U, W, EACH>(x, g, b, slopes, stride, intervals, t, bits);
    else derivatives<KIND, true, U, W, EACH>(x, g, b, slopes, stride, intervals, t, bits);
  } else {
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int j = 0; j < W; ++j) x[u][j] = g[u][j];
  }
  if (!Pass<KIND>::norm) return;
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int j = 0; j < W; ++j) {
      NormBackward &own = norm[EACH ? j : 0];
      if (Pass<KIND>::sums) own.add(x[u][j], centred[u][j]);
      else x[u][j] = own.input(x[u][j], centred[u][j]);
    }
}

// Add (g, t) to the sums a and (h, s) to the sums b. If both are the same sums, add both to a, which is stored last.
__device__ void add_two(float2 &a, float2 &b, bool same, float g, float t, float h, float s) {
  a.x += g, a.y = fmaf(g, t, a.y);
  if (same) a.x += h, a.y = fmaf(h, s, a.y);
  b.x += h, b.y = fmaf(h, s, b.y);
}

// Add U vectors to the columns of a thread: with EACH, element j to columns[j]; else all elements to the first. DISJOINT: the
// columns are all different, so that all sums of a vector can be loaded at once.
template <int U, int W, bool EACH, bool DISJOINT>
__device__ void accumulate(const float (&g)[U][W], const float (&t)[U][W], const unsigned (&bits)[U][W],
                           const unsigned *columns, unsigned stride) {
  constexpr int AT_ONCE = DISJOINT ? W : 1;
#pragma unroll
  for (int u = 0; u < U; u += 2)
#pragma unroll
    for (int from = 0; from < W; from += AT_ONCE) {
      const int v = (u + 1) % U;
      float2 a[AT_ONCE], b[AT_ONCE];
      unsigned first[AT_ONCE], second[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int j = from + k;
        const unsigned column = columns[EACH ? j : 0];
        first[k] = bits[u][j] * stride + column, second[k] = bits[v][j] * stride + column;
        a[k] = load_pair(first[k]);
        if (U > 1) b[k] = load_pair(second[k]);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int j = from + k;
        if (U > 1) add_two(a[k], b[k], first[k] == second[k], g[u][j], t[u][j], g[v][j], t[v][j]);
        else a[k].x += g[u][j], a[k].y = fmaf(g[u][j], t[u][j], a[k].y);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        if (U > 1) store_pair(second[k], b[k]);
        store_pair(first[k], a[k]);
      }
    }
}

// The inputs of a thread, prefetched while the previous ones are processed.
template <typename T, int W, int KIND>
struct Read {
  Vector<T, W> x, grad, residual;
  __device__ void fetch(const Vector<T, W> *from, const Vector<T, W> *of_grad, const Vector<T, W> *of_residual, i64 at) {
    x = from[at], grad = of_grad[at];
    if (Pass<KIND>::reads_residual) residual = of_residual[at];
  }
  // Stand for a vector past the end: zeros change no sum. It takes fewer instructions to clear a vector than its elements.
  __device__ void clear() { x = {}, grad = {}, residual = {}; }
  __device__ void decode(float (&values)[W], float (&g)[W], float (&added)[W]) const {
    x.decode(values);
    grad.decode(g);
    if (Pass<KIND>::reads_residual) residual.decode(added);
  }
};

// A block processes one channel; a thread processes U vectors at a time. With many intervals few threads fit, so U is larger.
template <typename T, int W, int KIND, int U>
__device__ void backward_planes(const Arguments &a) {
  using On = Pass<KIND>;
  extern __shared__ float2 columns[];  // [line][thread], then the slopes, then origins with KNOTS
  const int lines = LINES(KIND, a.intervals), sum_lines = SUM_LINES(KIND, a.intervals), threads = blockDim.x,
            channel = blockIdx.x;
  float *slopes = reinterpret_cast<float *>(columns + (On::sums ? sum_lines * threads : 0));
  const Stretch<W> stretch(a);
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x);
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad);
  const Vector<T, W> *__restrict__ residual = static_cast<const Vector<T, W> *>(a.residual);
  Vector<T, W> *__restrict__ out = static_cast<Vector<T, W> *>(a.out);
  Read<T, W, KIND> ahead[U];
  i64 at[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    at[u] = stretch.at(threadIdx.x + u * threads);
    if (threadIdx.x + u * threads < stretch.count) ahead[u].fetch(x, grad, residual, at[u]);
    else if (U > 1) ahead[u].clear();
  }
  NormBackward norm;
  if (On::norm) norm = NormBackward(a, channel, On::sums);
  Finder<KIND> b;
  if (On::slopes) {
    float *origins = slopes + lines;
    b = finder<KIND>(a, channel, address_of(origins), 4);
    for (int k = threadIdx.x; k < lines; k += threads) {
      slopes[k] = line<KIND>(a, channel, k, b).x;
      if (KIND & KNOTS) origins[k] = origin(a, channel, k);
    }
  }
  const unsigned own = address_of(columns + threadIdx.x), stride = 8 * threads, column = lines_from<KIND>(own, stride);
  if (On::sums)
    for (int k = 0; k < lines; ++k) store_pair(own + k * stride, make_float2(0.0f, 0.0f));
  __syncthreads();
  const unsigned table = lines_from<KIND>(address_of(slopes), 4);
  const float intervals = (float)a.intervals, limit = b.limit();
  for (int i = threadIdx.x; i < stretch.count; i += U * threads) {
    float values[U][W], g[U][W], added[U][W], t[U][W];
    unsigned bits[U][W];
    i64 here[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      ahead[u].decode(values[u], g[u], added[u]);
      here[u] = at[u];
      const int next = i + (U + u) * threads;
      if (next < stretch.count) {
        at[u] = stretch.at(next);
        ahead[u].fetch(x, grad, residual, at[u]);
      } else if (U > 1) {
        ahead[u].clear();
      }
    }
    differentiate<KIND, U, W, false>(values, g, added, &norm, &b, &table, 4, intervals, limit, t, bits);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vector<T, W> result;
      result.encode(values[u]);
      if (On::writes && (u == 0 || i + u * threads < stretch.count)) out[here[u]] = result;
    }
    if (On::sums) accumulate<U, W, false, false>(g, t, bits, &column, stride);
  }
  if (!On::sums) return;
  if (On::norm) store_pair(own + lines * stride, make_float2(norm.g_term, norm.centred_term));
  __syncthreads();
  const auto sum_of = [&](int k, int from, int count) {  // sum of the columns of line k; each k starts at a different bank
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
  if (sum_lines > threads) {
    for (int k = threadIdx.x; k < sum_lines; k += threads) columns[k * threads] = sum_of(k, 0, threads);
  } else {  // several threads per line, each adds up a part of the columns
    const int parts = threads / sum_lines, part = threadIdx.x / sum_lines;
    const int length = (threads + parts - 1) / parts, from = part * length;
    float2 sum = make_float2(0.0f, 0.0f);
    if (part < parts && from < threads) sum = sum_of(threadIdx.x % sum_lines, from, min(length, threads - from));
    __syncthreads();
    columns[threadIdx.x] = sum;  // [part][line]
    __syncthreads();
    if (threadIdx.x < sum_lines) {
      for (int other = 1; other < parts; ++other) {
        sum.x += columns[other * sum_lines + threadIdx.x].x;
        sum.y += columns[other * sum_lines + threadIdx.x].y;
      }
      columns[threads + threadIdx.x] = sum;
    }
    totals = columns + threads, apart = 1;
  }
  if (a.splits > 1 || (KIND & DYNAMIC)) {
    const i64 split = (i64)blockIdx.y * gridDim.z + blockIdx.z;
    float2 *partial = static_cast<float2 *>(a.partial) + split * sum_lines * a.channels + channel;
    for (int k = threadIdx.x; k < sum_lines; k += threads) partial[(i64)k * a.channels] = totals[k * apart];
    return;
  }
  __syncthreads();
  if (threadIdx.x < 32) finish<KIND & KNOTS>(a, channel, [&](int k) { return widen(totals[k * apart]); });
}

// A block processes a panel of vectors in a range of rows. A thread processes one vector per row. It has one column for each
// channel of that vector. It prefetches several vectors, and processes two at a time.
template <typename T, int W, int KIND, bool MIXED>
__device__ void backward_rows(const Arguments &a) {
  using On = Pass<KIND>;
  constexpr int U = MIXED ? MIXED_AT_ONCE : On::sums ? ROWS_AT_ONCE : ROWS_AT_ONCE / 2;  // without columns, more threads fit
  constexpr int OWN = MIXED ? (W > 1 ? 2 : 1) : W;  // columns per thread
  extern __shared__ float2 columns[];  // [line][own column][thread], then the slopes, [line][place], then origins with KNOTS
  const int lines = LINES(KIND, a.intervals), sum_lines = SUM_LINES(KIND, a.intervals), threads = blockDim.x;
  const Panel<W, MIXED> panel(a);
  const int rows = panel.rows, places = panel.places;
  const unsigned stride = panel.stride;
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x) + panel.start;
  const Vector<T, W> *__restrict__ grad = static_cast<const Vector<T, W> *>(a.grad) + panel.start;
  const Vector<T, W> *__restrict__ residual = static_cast<const Vector<T, W> *>(a.residual) + panel.start;
  Vector<T, W> *__restrict__ out = static_cast<Vector<T, W> *>(a.out) + panel.start;
  Read<T, W, KIND> ahead[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (u < panel.count) ahead[u].fetch(x, grad, residual, (i64)u * stride);
    else ahead[u].clear();
  }

  float *slopes = reinterpret_cast<float *>(columns + (On::sums ? sum_lines * OWN * threads : 0));
  float *origins = slopes + lines * places, *after = (KIND & KNOTS) ? origins + lines * places : origins;
  float *room = On::sums ? reinterpret_cast<float *>(columns) : after;  // the columns are not yet in use
  NormBackward norm[W];
  Finder<KIND> b[W];
  float limit = 1e30f;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (On::norm) norm[j] = NormBackward(a, panel.channel[j], On::sums);
    if (!On::slopes) continue;
    b[j] = finder<KIND>(a, panel.channel[j], address_of(origins + panel.place[j]), 4 * places);
    limit = fminf(limit, b[j].limit());
  }
  if (On::slopes)
    lines_of_panel<KIND>(a, panel, room, [&](int k, int place, float2 entry, float origin) {
      slopes[k * places + place] = entry.x;
      if (KIND & KNOTS) origins[k * places + place] = origin;
    });
  __syncthreads();
  const unsigned own_address = address_of(columns + threadIdx.x), column_bytes = 8 * OWN * threads, line_bytes = 4 * places;
  if (On::sums)
    for (int k = 0; k < lines * OWN; ++k) store_pair(own_address + k * 8 * threads, make_float2(0.0f, 0.0f));
  unsigned column[W], table[W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const int own_column = MIXED ? panel.channel[j] - panel.channel[0] : j;
    column[j] = keep(lines_from<KIND>(own_address + own_column * 8 * threads, column_bytes));
    table[j] = lines_from<KIND>(address_of(slopes + panel.place[j]), line_bytes);
  }
  const float intervals = (float)a.intervals;
  for (int i = 0; i < panel.count; i += U) {
    Read<T, W, KIND> now[U];
    x += (i64)U * stride, grad += (i64)U * stride, residual += (i64)U * stride;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      now[u] = ahead[u];
      if (i + U + u < panel.count) ahead[u].fetch(x, grad, residual, (i64)u * stride);
      else ahead[u].clear();
    }
#pragma unroll
    for (int u = 0; u < U; u += 2) {
      float values[2][W], g[2][W], added[2][W], t[2][W];
      unsigned bits[2][W];
      const bool valid[2] = {u == 0 || i + u < panel.count, i + u + 1 < panel.count};
#pragma unroll
      for (int v = 0; v < 2; ++v) now[u + v].decode(values[v], g[v], added[v]);
      differentiate<KIND, 2, W, true>(values, g, added, norm, b, table, line_bytes, intervals, limit, t, bits);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        Vector<T, W> result;
        result.encode(values[v]);
        if (On::writes && valid[v]) out[(i64)(u + v) * stride] = result;
      }
      if (On::sums) accumulate<2, W, true, !MIXED>(g, t, bits, column, column_bytes);
    }
    out += (i64)U * stride;
  }
  if (!On::sums) return;
  if (On::norm) {
    float2 norm_sum[OWN];
#pragma unroll
    for (int own = 0; own < OWN; ++own) norm_sum[own] = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      float2 &pair = norm_sum[!MIXED ? j : OWN > 1 && panel.channel[j] != panel.channel[0] ? OWN - 1 : 0];
      pair.x += norm[j].g_term, pair.y += norm[j].centred_term;
    }
#pragma unroll
    for (int own = 0; own < OWN; ++own) store_pair(own_address + lines * column_bytes + own * 8 * threads, norm_sum[own]);
  }
  __syncthreads();
  // Add up the columns of all threads with the same channel, in the column of the first of them. A warp processes lines of 32
  // channels.
  const int width = a.width, inner = MIXED ? (int)a.inner : 1;
  const auto first_of = [&](int c) { return c * inner / W; };  // vector
  const auto own = [&](int c, int vector) { return MIXED ? (int)(vector * W < c * inner) : c % W; };  // 1 if c is the second
  const int lane = threadIdx.x % 32, warps = threads / 32;
  for (int base = 0; base < panel.channels; base += 32) {
    const int c = base + lane;
    if (c >= panel.channels) continue;
    const int first = first_of(c), last = MIXED ? ((c + 1) * inner - 1) / W : first;
    for (int k = threadIdx.x / 32; k < sum_lines; k += warps) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (int vector = first; vector <= last; ++vector) {
        const float2 *parts = columns + (k * OWN + own(c, vector)) * threads + vector;
#pragma unroll 4
        for (int row = 0; row < rows; ++row) sum.x += parts[row * width].x, sum.y += parts[row * width].y;
      }
      if (a.splits > 1 || (KIND & DYNAMIC))
        static_cast<float2 *>(a.partial)[((i64)blockIdx.y * sum_lines + k) * a.channels + panel.first_channel + c] = sum;
      else columns[(k * OWN + own(c, first)) * threads + first] = sum;
    }
  }
  if (a.splits > 1 || (KIND & DYNAMIC)) return;
  __syncthreads();
  for (int c = threadIdx.x / 32; c < panel.channels; c += threads / 32)
    finish<KIND & KNOTS>(a, panel.first_channel + c,
                         [&](int k) { return widen(columns[(k * OWN + own(c, first_of(c))) * threads + first_of(c)]); });
}
