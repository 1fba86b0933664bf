// The kernels forward, lookup, moments and observe: map x to y, or collect the moments of x, or both. With NORM, z replaces x.

#define MAP_ROWS_AT_ONCE 8  // vectors of a column that a thread processes at a time
#define MAP_MIXED_AT_ONCE 4

// Count, mean and sum of squared deviations of a part of the elements of a channel.
struct Moments {
  float count, mean, m2;
};

// Sums of differences from a number near the mean, so that a large mean costs no precision.
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

// Several parts, merged by the rule of Chan, Golub and LeVeque. The mean is stored as a difference from the mean of the first
// part, so that the steps do not round it to the precision of a large mean.
struct Merged {
  float base;
  Moments sum;
  __device__ void add(Moments part) {
    if (part.count == 0.0f) return;
    if (sum.count == 0.0f) base = part.mean;
    const float count = sum.count + part.count, share = part.count / count, difference = part.mean - base - sum.mean;
    const float m2 = sum.m2 + part.m2 + difference * difference * sum.count * share;
    sum = {count, fmaf(difference, share, sum.mean), m2};
  }
  __device__ Moments moments() const { return {sum.count, base + sum.mean, sum.m2}; }
};

// Return the sum over all threads of a warp.
template <typename T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Replace x by y. `lines` is the result of lines_from with this `stride`, for place 0. With EACH, element j has its own finder
// and place; else all elements share the first finder.
template <int KIND, bool CARE, bool EACH, int W>
__device__ void evaluate(float (&x)[1][W], const Finder<KIND> *b, unsigned lines, const int *places, unsigned stride,
                         float intervals) {
  unsigned found[1][W];
  search<CARE, EACH>(b, x, found);
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const Place place = place_of<KIND, CARE>(x[0][j], b[EACH ? j : 0], intervals, found[0][j]);
    const float2 entry = load_pair(place.bits() * stride + (EACH ? lines + 8 * places[j] : lines));
    x[0][j] = fmaf(place.u, entry.x, entry.y);
  }
}

__device__ float2 entry_of_lookup(const Arguments &a, int channel, int k) {
  const i64 at = (i64)channel * (a.intervals + 2) + k;
  return make_float2(read(a.parameters[2], at, a.kind), read(a.parameters[3], at, a.kind));
}

// Return the elements of a vector: x, or z with NORM. With EACH, element j has norm j; else all elements share the first norm.
template <int KIND, bool EACH = false, typename Vectors, int W>
__device__ void decode(const Vectors &x, const Vectors &residual, const Normal *normal, float (&values)[W]) {
  x.decode(values);
  if (!(KIND & NORM)) return;
  float added[W];
  if (KIND & ADD) residual.decode(added);
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const Normal &own = normal[EACH ? j : 0];
    values[j] = (KIND & ADD) ? own.z(values[j], added[j]) : own.z(values[j]);
  }
}

// A block processes one channel.
template <typename T, int W, int KIND>
__device__ void map_planes(const Arguments &a) {
  extern __shared__ float2 table[];  // [line], then origins with KNOTS
  __shared__ Moments of_warps[8];  // plan.py counts this as _STATIC_BYTES
  const int channel = blockIdx.x, threads = blockDim.x;
  const Stretch<W> stretch(a);
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x);
  const Vector<T, W> *__restrict__ residual = static_cast<const Vector<T, W> *>(a.residual);
  Vector<T, W> *__restrict__ y = static_cast<Vector<T, W> *>(a.out);
  Vector<T, W> ahead, added;  // prefetched while the previous vectors are processed
  i64 at = stretch.at(threadIdx.x);
  const auto fetch = [&] {
    ahead = x[at];
    if (KIND & ADD) added = residual[at];
  };
  if (threadIdx.x < stretch.count) fetch();
  Normal normal;
  if (KIND & NORM) normal = Normal(a, channel);
  Finder<KIND> b;
  float limit = 1e30f;
  if (KIND & (FORWARD | LOOKUP)) {
    const int entries = (KIND & LOOKUP) ? a.intervals + 2 : LINES(KIND, a.intervals);
    float *origins = reinterpret_cast<float *>(table + entries);
    b = finder<KIND>(a, channel, address_of(origins), 4);
    if (KIND & FORWARD) limit = b.limit();
    for (int k = threadIdx.x; k < entries; k += threads) {
      table[k] = (KIND & LOOKUP) ? entry_of_lookup(a, channel, k) : line<KIND>(a, channel, k, b);
      if (KIND & KNOTS) origins[k] = origin(a, channel, k);
    }
    __syncthreads();
  }
  Shifted shifted = {0.0f, 0.0f, 0.0f};
  int seen = 0;
  if (KIND & MOMENTS) {  // the shift of a warp is the mean of the first elements of its threads
    float first[W];
    decode<KIND>(ahead, added, &normal, first);
    const bool any = threadIdx.x < stretch.count;
    const float sum = warp_sum(any ? first[0] : 0.0f), count = warp_sum(any ? 1.0f : 0.0f);
    shifted.shift = sum / fmaxf(count, 1.0f);
  }
  const float intervals = (float)a.intervals;
  const unsigned lines = lines_from<KIND>(address_of(table), 8);
  for (int i = threadIdx.x; i < stretch.count; i += threads) {
    float values[1][W];
    decode<KIND>(ahead, added, &normal, values[0]);
    const i64 here = at;
    if (i + threads < stretch.count) {
      at = stretch.at(i + threads);
      fetch();
    }
    if (KIND & MOMENTS) {
#pragma unroll
      for (int j = 0; j < W; ++j) shifted.add(values[0][j]);
      seen += W;
    }
    if (KIND & (FORWARD | LOOKUP)) {
      if (are_tame(values[0], limit)) evaluate<KIND, false, false>(values, &b, lines, nullptr, 8, intervals);
      else evaluate<KIND, true, false>(values, &b, lines, nullptr, 8, intervals);
      Vector<T, W> result;
      result.encode(values[0]);
      y[here] = result;
    }
  }
  if (KIND & MOMENTS) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shifted.sum = warp_sum(shifted.sum);
    shifted.squares = warp_sum(shifted.squares);
    const Moments of_warp = shifted.moments(warp_sum((float)seen));
    if (lane == 0) of_warps[warp] = of_warp;
    __syncthreads();
    if (threadIdx.x == 0) {
      Merged merged = {};
      for (int each = 0; each < threads / 32; ++each) merged.add(of_warps[each]);
      const i64 split = (i64)blockIdx.y * gridDim.z + blockIdx.z;
      static_cast<Moments *>(a.partial)[split * a.channels + channel] = merged.moments();
    }
  }
}

// A block processes a panel of vectors in a range of rows; a thread processes one vector per row.
template <typename T, int W, int KIND, bool MIXED>
__device__ void map_rows(const Arguments &a) {
  constexpr int U = MIXED ? MAP_MIXED_AT_ONCE : MAP_ROWS_AT_ONCE;
  extern __shared__ float2 table[];  // [line][place], then origins with KNOTS, then room for heights; later, moments
  const Panel<W, MIXED> panel(a);
  const unsigned stride = panel.stride;
  const Vector<T, W> *__restrict__ x = static_cast<const Vector<T, W> *>(a.x) + panel.start;
  const Vector<T, W> *__restrict__ residual = static_cast<const Vector<T, W> *>(a.residual) + panel.start;
  Vector<T, W> *__restrict__ y = static_cast<Vector<T, W> *>(a.out) + panel.start;
  Vector<T, W> ahead[U], added[U];
  const auto fetch = [&](int u) {
    ahead[u] = x[(i64)u * stride];
    if (KIND & ADD) added[u] = residual[(i64)u * stride];
  };
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (u < panel.count) fetch(u);
  Normal normal[W];
  if (KIND & NORM) {
#pragma unroll
    for (int j = 0; j < W; ++j) normal[j] = Normal(a, panel.channel[j]);
  }
  Finder<KIND> b[W];
  float limit = 1e30f;
  if (KIND & (FORWARD | LOOKUP)) {
    const int places = panel.places, entries = LINES(KIND, a.intervals) * places;
    float *origins = reinterpret_cast<float *>(table + entries);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      b[j] = finder<KIND>(a, panel.channel[j], address_of(origins + panel.place[j]), 4 * places);
      if (KIND & FORWARD) limit = fminf(limit, b[j].limit());
    }
    if (KIND & LOOKUP) {
      float *room = reinterpret_cast<float *>(table + (a.intervals + 2) * places);
      if (MIXED) {
        for (int c = threadIdx.x / 32; c < panel.channels; c += blockDim.x / 32)
          for (int k = threadIdx.x % 32; k < a.intervals + 2; k += 32)
            table[k * places + c] = entry_of_lookup(a, panel.first_channel + c, k);
        __syncthreads();
      } else {
        for (int part = 0; part < 2; ++part) {
          stage(a, a.parameters[2 + part], panel, a.intervals + 2, room);
          __syncthreads();
          for (int c = threadIdx.x; c < panel.channels; c += blockDim.x)
            for (int k = 0; k < a.intervals + 2; ++k)
              reinterpret_cast<float *>(table + k * places + panel.place_of(c))[part] = room[c * ((a.intervals + 2) | 1) + k];
          __syncthreads();
        }
      }
    } else {
      float *room = (KIND & KNOTS) ? origins + entries : origins;
      lines_of_panel<KIND>(a, panel, room, [&](int k, int place, float2 entry, float origin) {
        table[k * places + place] = entry;
        if (KIND & KNOTS) origins[k * places + place] = origin;
      });
      __syncthreads();
    }
  }
  Shifted shifted[W];
  int seen = 0;
  if (KIND & MOMENTS) {
    float values[W];
    decode<KIND, true>(ahead[0], added[0], normal, values);
#pragma unroll
    for (int j = 0; j < W; ++j) shifted[j] = {panel.count > 0 ? values[j] : 0.0f, 0.0f, 0.0f};
  }
  const float intervals = (float)a.intervals;
  const unsigned stride_of_lines = 8 * panel.places, lines = lines_from<KIND>(address_of(table), stride_of_lines);
  for (int i = 0; i < panel.count; i += U) {
    Vector<T, W> now[U], now_added[U];
    x += (i64)U * stride, residual += (i64)U * stride;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      now[u] = ahead[u], now_added[u] = added[u];
      if (i + U + u < panel.count) fetch(u);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool valid = u == 0 || i + u < panel.count;
      float values[1][W];
      decode<KIND, true>(now[u], now_added[u], normal, values[0]);
      if ((KIND & MOMENTS) && valid) {
#pragma unroll
        for (int j = 0; j < W; ++j) shifted[j].add(values[0][j]);
        ++seen;
      }
      if (KIND & (FORWARD | LOOKUP)) {
        if (are_tame(values[0], limit)) evaluate<KIND, false, true>(values, b, lines, panel.place, stride_of_lines, intervals);
        else evaluate<KIND, true, true>(values, b, lines, panel.place, stride_of_lines, intervals);
        Vector<T, W> result;
        result.encode(values[0]);
        if (valid) y[(i64)u * stride] = result;
      }
    }
    y += (i64)U * stride;
  }
  if (KIND & MOMENTS) {
    Moments *of_threads = reinterpret_cast<Moments *>(table);  // [own channel][thread], as in backward.cu
    const int threads = blockDim.x, width = a.width, rows = panel.rows, inner = MIXED ? (int)a.inner : 1;
    __syncthreads();
    Merged first = {}, second = {};
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Moments mine = shifted[j].moments((float)seen);
      if (!MIXED) of_threads[j * threads + threadIdx.x] = mine;
      else if (panel.channel[j] == panel.channel[0]) first.add(mine);
      else second.add(mine);
    }
    if (MIXED) of_threads[threadIdx.x] = first.moments(), of_threads[threads + threadIdx.x] = second.moments();
    __syncthreads();
    for (int c = threadIdx.x; c < panel.channels; c += threads) {
      Merged merged = {};
      for (int vector = c * inner / W; vector <= ((c + 1) * inner - 1) / W; ++vector) {
        const int own = MIXED ? (int)(vector * W < c * inner) : c % W;
        for (int row = 0; row < rows; ++row) merged.add(of_threads[own * threads + row * width + vector]);
      }
      static_cast<Moments *>(a.partial)[(i64)blockIdx.y * a.channels + panel.first_channel + c] = merged.moments();
    }
  }
}
