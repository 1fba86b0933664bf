// Reduce the partial results of all blocks to one result per channel, in a fixed order and in float64.

// Add the sums of all groups of threads to those of the first.
__device__ void add_groups(double2 *sums, int groups, int per_group) {
  __syncthreads();
  for (int i = threadIdx.x; i < per_group; i += blockDim.x)
    for (int group = 1; group < groups; ++group) {
      sums[i].x += sums[group * per_group + i].x;
      sums[i].y += sums[group * per_group + i].y;
    }
  __syncthreads();
}

// A block processes `together` channels that are neighbours in memory, so that it uses all of the memory it fetches. `groups`
// groups of threads share the splits.
template <int KIND>
__device__ void reduce_gradients(const Arguments &a) {
  extern __shared__ double2 sums[];  // [group][line][channel]
  const int lines = LINES(KIND, a.intervals) + (a.sums ? 1 : 0), together = a.together, groups = a.groups,
            first = blockIdx.x * together;
  const int per_group = lines * together;
  for (int i = threadIdx.x; i < groups * per_group; i += blockDim.x) {
    const int group = i / per_group, k = i % per_group / together, channel = first + i % together;
    double2 sum = make_double2(0.0, 0.0);
    if (channel < a.channels) {
      const float2 *partial = static_cast<const float2 *>(a.partial) + (i64)k * a.channels + channel;
      const i64 stride = (i64)lines * a.channels;
#pragma unroll 8
      for (int split = group; split < a.splits; split += groups) {
        const float2 part = partial[split * stride];
        sum.x += part.x, sum.y += part.y;
      }
    }
    sums[i] = sum;
  }
  add_groups(sums, groups, per_group);
  for (int c = threadIdx.x / 32; c < together; c += blockDim.x / 32)
    if (first + c < a.channels) finish<KIND>(a, first + c, [&](int k) { return sums[k * together + c]; });
}

// Return the mean and the sum of squared deviations of a channel over all partial results, by one warp. Add up differences
// from the mean of the first part, because this needs no divisions.
__device__ double2 total_moments(const Arguments &a, int channel) {
  const Moments *partial = static_cast<const Moments *>(a.partial) + channel;
  const double shift = partial[0].mean;
  double count = 0.0, sum = 0.0, squares = 0.0;
  for (int split = threadIdx.x % 32; split < a.splits; split += 32) {
    const Moments part = partial[(i64)split * a.channels];
    const double difference = part.count > 0.0f ? part.mean - shift : 0.0;
    count += part.count;
    sum += part.count * difference;
    squares += part.m2 + part.count * difference * difference;
  }
  count = warp_sum(count), sum = warp_sum(sum), squares = warp_sum(squares);
  const double between = squares - sum * (sum / count);
  return make_double2(shift + sum / count, between < 0.0 ? 0.0 : between);
}

// Compute reference.merge, with the same rounding of each operation.
__device__ void add_to_pool(const Arguments &a, int channel, float mean, float m2) {
  float *pool = a.pool + channel, *pool_mean = pool + a.channels, *pool_m2 = pool_mean + a.channels;
  const float n_1 = *pool, n_2 = __ll2float_rn(a.per_channel), n = __fadd_rn(n_1, n_2);
  const float share = __fdiv_rn(n_2, n < 1.0f ? 1.0f : n);
  const float distance = __fsub_rn(mean, *pool_mean);
  *pool = n;
  *pool_mean = __fadd_rn(*pool_mean, __fmul_rn(distance, share));
  *pool_m2 = __fadd_rn(__fadd_rn(*pool_m2, m2), __fmul_rn(__fmul_rn(distance, n_1), __fmul_rn(distance, share)));
}

// Add the moments of all parts to the pool: one warp per channel.
__device__ void reduce_moments(const Arguments &a) {
  const int channel = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (channel >= a.channels) return;
  const double2 total = total_moments(a, channel);
  if (threadIdx.x % 32 == 0) add_to_pool(a, channel, (float)total.x, (float)total.y);
}

// Compute the norm of a channel, by one warp: from the moments of all parts or, without parts, from the running statistics.
// `parameters` holds gamma and beta. `gradients` holds the running mean, the running variance and the number of batches. With
// parts, these are updated.
__device__ void reduce_norm(const Arguments &a) {
  const int channel = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (channel >= a.channels) return;
  float *running_mean = static_cast<float *>(a.gradients[0]), *running_variance = static_cast<float *>(a.gradients[1]);
  double mean, variance;
  if (a.partial) {
    const double2 total = total_moments(a, channel);
    mean = total.x, variance = total.y / a.per_channel;
    if (threadIdx.x % 32) return;
    if (running_mean) {
      const double unbiased = total.y / (a.per_channel - 1), kept = 1.0 - (double)a.factor;
      running_mean[channel] = (float)(kept * running_mean[channel] + a.factor * mean);
      running_variance[channel] = (float)(kept * running_variance[channel] + a.factor * unbiased);
    }
    if (a.gradients[2] && channel == 0) ++*static_cast<i64 *>(a.gradients[2]);
  } else {
    if (threadIdx.x % 32) return;
    mean = running_mean[channel], variance = running_variance[channel];
  }
  const double inv_std = 1.0 / sqrt(variance + (double)a.eps);
  const float gamma = a.parameters[0] ? static_cast<const float *>(a.parameters[0])[channel] : 1.0f;
  const float beta = a.parameters[1] ? static_cast<const float *>(a.parameters[1])[channel] : 0.0f;
  a.norm[channel] = (float)mean;
  a.norm[a.channels + channel] = (float)inv_std;
  a.norm[2 * a.channels + channel] = (float)(gamma * inv_std);
  a.norm[3 * a.channels + channel] = beta;
  // Apart from eps, z has mean beta and standard deviation gamma.
  if (a.pool) add_to_pool(a, channel, beta, (float)(gamma * (double)gamma * variance * inv_std * inv_std * a.per_channel));
}
