// The last, small reductions: over what the blocks found, in a fixed order and in float64, to one result a channel.

__device__ void reduce_gradients(const Arguments &a) {
  extern __shared__ double2 sums[];  // [warp][segment]
  const int segments = a.intervals + 2, channel = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const float2 *partial = static_cast<const float2 *>(a.partial) + (i64)channel * segments;
  const i64 stride = (i64)a.channels * segments;
  for (int k = lane; k < segments; k += 32) {
    double2 sum = make_double2(0.0, 0.0);
#pragma unroll 8
    for (int split = warp; split < a.splits; split += warps) {
      const float2 part = partial[split * stride + k];
      sum.x += part.x, sum.y += part.y;
    }
    sums[warp * segments + k] = sum;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < segments; k += blockDim.x)
    for (int other = 1; other < warps; ++other) {
      sums[k].x += sums[other * segments + k].x;
      sums[k].y += sums[other * segments + k].y;
    }
  __syncthreads();
  if (warp == 0) finish(a, channel, [&](int k) { return sums[k]; });
}

// One warp a channel.
__device__ void reduce_moments(const Arguments &a) {
  const int channel = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (channel >= a.channels) return;
  const Moments *partial = static_cast<const Moments *>(a.partial) + channel;
  double count = 0.0, mean = 0.0, m2 = 0.0;
  for (int split = lane; split < a.splits; split += 32) {
    const Moments part = partial[(i64)split * a.channels];
    if (part.count == 0.0f) continue;
    const double total = count + part.count, difference = part.mean - mean;
    mean += difference * (part.count / total);
    m2 += part.m2 + difference * difference * (count * part.count / total);
    count = total;
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const double other = __shfl_xor_sync(~0u, count, step), total = count + other;
    const double difference = __shfl_xor_sync(~0u, mean, step) - mean, more = __shfl_xor_sync(~0u, m2, step);
    if (total > 0.0) {
      mean += difference * (other / total);
      m2 += more + difference * difference * (count * other / total);
      count = total;
    }
  }
  if (lane == 0) {
    static_cast<float *>(a.mean)[channel] = (float)mean;
    static_cast<float *>(a.m2)[channel] = (float)m2;
    if (channel == 0) *static_cast<i64 *>(a.count) = a.per_channel;
  }
}
