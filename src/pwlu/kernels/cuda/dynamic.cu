// The kernels of a dynamic PWLU besides map and backward: the network that computes the coefficients, its gradient, sums over
// samples, and the gradient of the means. Sums have a fixed order, so the results are bitwise reproducible.

#define TILE 16
#define PER_WARP 16  // terms of a sum that a warp adds up at a time
#define TILE_ROW (TILE + 4)  // of shared memory, so that few writes share a bank

// Compute a tile of a matrix product: put(i, j, sum over k < depth of left(i, k) right(k, j)). The warps of a block take turns
// along k. The flags state whether neighbours along k are neighbours in memory.
template <bool LEFT_ALONG_K, bool RIGHT_ALONG_K, typename Left, typename Right, typename Put>
__device__ void product(int rows, int columns, int depth, int tile, const Left &left, const Right &right, const Put &put) {
  extern __shared__ float factors[];  // left and right as [k][i] and [k][j]; at the end, the sums of all warps
  constexpr int THREADS = TILE * TILE, TERMS = THREADS / 32 * PER_WARP, LOADS = TERMS * TILE / THREADS;
  const int across = (columns + TILE - 1) / TILE, first_row = tile / across * TILE, first_column = tile % across * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4 * 2, column = lane % 4 * 4;
  float *of_right = factors + TERMS * TILE_ROW, sums[2][4] = {};
  float lefts[LOADS], rights[LOADS];
  const auto k_of = [](bool along_k, int e) { return along_k ? e % TERMS : e / TILE; };
  const auto i_of = [](bool along_k, int e) { return along_k ? e / TERMS : e % TILE; };
  const auto fetch = [&](int base) {
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
      const int e = u * THREADS + threadIdx.x, i = first_row + i_of(LEFT_ALONG_K, e), j = first_column + i_of(RIGHT_ALONG_K, e);
      const int k = base + k_of(LEFT_ALONG_K, e), l = base + k_of(RIGHT_ALONG_K, e);
      lefts[u] = i < rows && k < depth ? left(i, k) : 0.0f;
      rights[u] = j < columns && l < depth ? right(l, j) : 0.0f;
    }
  };
  fetch(0);
  for (int base = 0; base < depth; base += TERMS) {
    __syncthreads();
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
      const int e = u * THREADS + threadIdx.x;
      factors[k_of(LEFT_ALONG_K, e) * TILE_ROW + i_of(LEFT_ALONG_K, e)] = lefts[u];
      of_right[k_of(RIGHT_ALONG_K, e) * TILE_ROW + i_of(RIGHT_ALONG_K, e)] = rights[u];
    }
    __syncthreads();
    if (base + TERMS < depth) fetch(base + TERMS);
    if (base + warp * PER_WARP >= depth) continue;
#pragma unroll 8
    for (int k = warp * PER_WARP; k < (warp + 1) * PER_WARP; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sums[i][j] = fmaf(factors[k * TILE_ROW + row + i], of_right[k * TILE_ROW + column + j], sums[i][j]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) factors[warp * THREADS + (row + i) * TILE + column + j] = sums[i][j];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int other = 0; other < THREADS / 32; ++other) sum += factors[other * THREADS + threadIdx.x];
  const int i = first_row + threadIdx.x / TILE, j = first_column + threadIdx.x % TILE;
  if (i < rows && j < columns) put(i, j, sum);
}

__device__ int tiles(int rows, int columns) { return (rows + TILE - 1) / TILE * ((columns + TILE - 1) / TILE); }

__device__ float *hidden_of(const Arguments &a) { return a.network.state + (i64)a.samples * a.features; }

// Compute a layer of the network: out = change(in W' + bias).
template <typename Change>
__device__ void layer(int samples, int inputs, int outputs, const float *in, const float *weight, const float *bias, float *out,
                      const Change &change) {
  product<true, true>(
      samples, outputs, inputs, blockIdx.x, [&](int i, int k) { return in[i * inputs + k]; },
      [&](int k, int j) { return weight[j * inputs + k]; },
      [&](int i, int j, float sum) { out[i * outputs + j] = change(sum + bias[j]); });
}

__device__ void first_layer(const Arguments &a) {
  const auto relu = [](float z) { return z < 0.0f ? 0.0f : z; };  // NaN stays NaN
  layer(a.samples, a.features, a.hidden, a.network.state, a.network.first, a.network.first_bias, hidden_of(a), relu);
}

__device__ void second_layer(const Arguments &a) {
  const auto squash = [](float z) { return tanhf(z); };
  layer(a.samples, a.hidden, a.directions * a.rates, hidden_of(a), a.network.second, a.network.second_bias, coefficients_of(a),
        squash);
}

// Compute the gradients of a layer, given that of its output before `change`. `of_in` receives change(i, gradient of in[i]).
template <typename Change>
__device__ void layer_backward(int samples, int inputs, int outputs, const float *grad, const float *in, const float *weight,
                               float *of_in, float *of_weight, float *of_bias, const Change &change) {
  const int first_tiles = tiles(samples, inputs), tile = blockIdx.x;
  if (tile < first_tiles) {
    product<true, false>(
        samples, inputs, outputs, tile, [&](int i, int k) { return grad[i * outputs + k]; },
        [&](int k, int j) { return weight[k * inputs + j]; },
        [&](int i, int j, float sum) { of_in[i * inputs + j] = change(i * inputs + j, sum); });
    return;
  }
  product<false, false>(
      outputs, inputs + 1, samples, tile - first_tiles, [&](int i, int k) { return grad[k * outputs + i]; },
      [&](int k, int j) { return j < inputs ? in[k * inputs + j] : 1.0f; },  // the last column is the bias
      [&](int i, int j, float sum) { *(j < inputs ? of_weight + i * inputs + j : of_bias + i) = sum; });
}

__device__ void second_layer_backward(const Arguments &a) {
  const float *hidden = hidden_of(a);
  const auto through_relu = [&](int at, float sum) { return hidden[at] <= 0.0f ? 0.0f : sum; };
  layer_backward(a.samples, a.hidden, a.directions * a.rates, a.network.of_outputs, hidden, a.network.second,
                 a.network.of_hidden, a.network.of_second, a.network.of_second_bias, through_relu);
}

__device__ void first_layer_backward(const Arguments &a) {
  const auto per_element = [&](int, float sum) { return sum * a.factor; };
  layer_backward(a.samples, a.features, a.hidden, a.network.of_hidden, a.network.state, a.network.first, a.network.of_means,
                 a.network.of_first, a.network.of_first_bias, per_element);
}

// Add up the partial results of a backward kernel with DYNAMIC over all samples, compute the gradients of the weight and the
// directions, and those of the coefficients before tanh. A block processes `together` channels; `groups` groups of threads share
// the samples and splits.
__device__ void reduce_samples(const Arguments &a) {
  extern __shared__ double2 sums[];  // [group][1 + direction][line][channel]
  const int of_sample = max(a.functions, a.rates), lines = LINES(0, a.intervals), together = a.together, groups = a.groups,
            first = blockIdx.x * together, per_group = (a.directions + 1) * lines * together;
  // Samples are folded into channels, or the results of each sample follow each other.
  const i64 to_line = a.channels, to_split = lines * to_line,
            to_sample = a.channels == of_sample ? a.splits * to_split : of_sample;
  const float2 *const partial = static_cast<const float2 *>(a.partial) + first;
  const float *const coefficients = coefficients_of(a);
  const auto coefficient = [&](int sample, int m, int c) {
    return ((i64)sample * a.directions + m) * a.rates + (a.rates == 1 ? 0 : first + c);
  };
  for (int i = threadIdx.x; i < groups * per_group; i += blockDim.x) {
    const int group = i / per_group, m = i % per_group / (lines * together), k = i / together % lines, c = i % together;
    double2 sum = make_double2(0.0, 0.0);
    const int entries = first + c < of_sample ? a.samples * a.splits : 0;
#pragma unroll 8
    for (int entry = group; entry < entries; entry += groups) {
      const int sample = entry / a.splits, split = entry - sample * a.splits;
      const float2 part = partial[sample * to_sample + split * to_split + k * to_line + c];
      const float factor = m == 0 ? 1.0f : coefficients[coefficient(sample, m - 1, c)];
      sum.x += (double)factor * part.x, sum.y += (double)factor * part.y;
    }
    sums[i] = sum;
  }
  add_groups(sums, groups, per_group);
  for (int c = threadIdx.x / 32; c < together; c += blockDim.x / 32)
    if (first + c < of_sample)
      finish<DYNAMIC>(a, first + c, [&](int k, int m = 0) { return sums[(m * lines + k) * together + c]; });
  // The gradient of a coefficient is the sum of g times the function of its direction, which is linear on each line.
  const int n = a.intervals;
  for (int i = threadIdx.x; i < a.samples * a.directions * together; i += blockDim.x) {
    const int c = i % together, m = i / together % a.directions, sample = i / together / a.directions;
    if (first + c >= of_sample) continue;
    const float *direction = a.network.directions + ((i64)m * a.functions + function_of<DYNAMIC>(a, first + c)) * (n + 1);
    double sum = 0.0;
    for (int split = 0; split < a.splits; ++split) {
      const float2 *part = partial + sample * to_sample + split * to_split + c;
      sum += (double)part[0].x * direction[0] + (double)part[(n + 2) * to_line].x * direction[n];
#pragma unroll 4
      for (int k = 1; k <= n + 1; ++k) {
        const int interval = min(k, n) - 1;
        const float begin = direction[interval], end = direction[interval + 1];
        const double g = part[k * to_line].x, t = part[k * to_line].y - interval * g;
        sum += g * begin + t * ((double)end - begin);
      }
    }
    const i64 at = coefficient(sample, m, c);
    const float value = (float)(sum * (1.0 - (double)coefficients[at] * coefficients[at]));
    if (a.rates < of_sample) a.network.of_coefficients[((i64)sample * a.directions + m) * of_sample + first + c] = value;
    else a.network.of_outputs[at] = value;
  }
}

// Compute the means of the channels of every sample if inner is 1. Blocks are (panel of `width` vectors, sample). The threads of a
// block process several rows at a time.
template <typename T, int W>
__device__ void means(const Arguments &a) {
  extern __shared__ float of_rows[];  // [row][channel]
  constexpr int AT_ONCE = 8;
  const int across = threadIdx.x % a.width, down = threadIdx.x / a.width, rows = blockDim.x / a.width, length = a.features / W;
  const int vector = blockIdx.x * a.width + across, channels = a.width * W, sample = blockIdx.y;
  const Vector<T, W> *x = static_cast<const Vector<T, W> *>(a.x) + (i64)sample * a.outer * length + vector;
  float sums[W];
#pragma unroll
  for (int j = 0; j < W; ++j) sums[j] = 0.0f;
  const bool active = vector < length && down < rows;
  for (int row = down; active && row < a.outer; row += AT_ONCE * rows) {
    Vector<T, W> vectors[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      vectors[u] = {};
      if (row + u * rows < a.outer) vectors[u] = x[(i64)(row + u * rows) * length];
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      float values[W];
      vectors[u].decode(values);
#pragma unroll
      for (int j = 0; j < W; ++j) sums[j] += values[j];
    }
  }
  if (down < rows)
#pragma unroll
    for (int j = 0; j < W; ++j) of_rows[down * channels + across * W + j] = sums[j];
  __syncthreads();
  for (int c = threadIdx.x; c < channels && blockIdx.x * channels + c < a.features; c += blockDim.x) {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) sum += of_rows[row * channels + c];
    a.network.state[(i64)sample * a.features + blockIdx.x * channels + c] = sum / (float)a.outer;
  }
}

// Add the gradient of the means to that of x. Blocks are (vectors of a sample, sample); features is the number of means.
template <typename T, int W>
__device__ void add_means(const Arguments &a) {
  const unsigned count = (unsigned)(a.per_channel / W), inner = (unsigned)a.inner;  // vectors of a sample
  for (int sample = blockIdx.y; sample < a.samples; sample += gridDim.y) {
    const float *means = a.network.of_means + (i64)sample * a.features;
    Vector<T, W> *out = static_cast<Vector<T, W> *>(a.out) + (i64)sample * count;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
      const unsigned channel = (inner == 1 ? i * W : i / (inner / W)) % a.features;
      Vector<T, W> vector = out[i];
      float values[W];
      vector.decode(values);
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] += means[inner == 1 ? channel + j : channel];
      vector.encode(values);
      out[i] = vector;
    }
  }
}
