
// The learning rule "shared", as in pwlu/learning/shared_rule.py, which derives its formulas. Both kernels change tensors of
// several units in place, and one block computes a unit. Sums have a fixed order. Differences, sums and linear systems are
// computed in float64: the systems are badly conditioned where bends are penalized strongly.

constexpr int RULE_UNITS = 128;

// The arguments of both kernels, in 4 KB, the limit of a launch. Block b computes units[b]; `first` counts the functions of all
// units before it. In `common`, `eps` is `sharing`, and
// - `partial` is w of each function, from the weights before the optimizer's step;
// - `out` has room for one float32 number per height of all functions, (F, N+1). If the rate has to be measured, it holds the
//   heights before the step, and `sums` their shared gradients; else `sums` is null.
struct RuleArguments {
  Arguments common;
  struct {
    float *weight, *grad;
    int first, channels;
  } units[RULE_UNITS];
};

// The weight of a unit, or its gradient.
struct Unit {
  float *values;
  int channels, intervals;
  double part;  // 1/N: divisions take long

  __device__ Unit(float *values, int channels, int intervals)
      : values(values), channels(channels), intervals(intervals), part(1.0 / intervals) {}

  __device__ float &slope(int side, int c) const { return values[(2 + side) * channels + c]; }
  __device__ float &height(int c, int k) const { return values[4 * channels + (i64)c * (intervals + 1) + k]; }
  __device__ double interval(int c) const { return ((double)values[channels + c] - values[c]) * part; }
  // Return the rise from knot k - 1 to knot k; over d beyond the bounds.
  __device__ double rise(int c, int k) const {
    if (k == 0) return slope(0, c) * interval(c);
    return k > intervals ? slope(1, c) * interval(c) : (double)height(c, k) - height(c, k - 1);
  }
  __device__ double bend(int c, int k) const { return rise(c, k + 1) - rise(c, k); }
};

// Return the sum over all threads of a block. `room` holds one number per warp.
__device__ double block_sum(double value, double *room) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += room[warp];
  __syncthreads();
  return sum;
}

// Return 1 / (RMS of d): w of a function is d times that.
__device__ double inverse_size(const Unit &unit, double *room) {
  double squares = 0.0;
  for (int c = threadIdx.x; c < unit.channels; c += blockDim.x) squares += unit.interval(c) * unit.interval(c);
  return 1.0 / sqrt(block_sum(squares, room) / unit.channels + 1e-24);
}

// Write the sums of value(function, column) over all functions to `sums`. It has room for `groups` times the columns.
template <typename F>
__device__ void sum_functions(int functions, int columns, int groups, double *sums, F value) {
  for (int i = threadIdx.x; i < groups * columns; i += blockDim.x) {
    double sum = 0.0;
#pragma unroll 4
    for (int c = i / columns; c < functions; c += groups) sum += value(c, i % columns);
    sums[i] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    for (int group = 1; group < groups; ++group) sums[i] += sums[group * columns + i];
  __syncthreads();
}

// Replace gradients by the shared ones, and keep what `smooth` needs.
__device__ void share_gradients(const RuleArguments &rule) {
  extern __shared__ double room[];  // one number per warp; sums of the slopes and heights
  double *const sums = room + blockDim.x / 32;
  const Arguments &a = rule.common;
  const auto mine = rule.units[blockIdx.x];
  const Unit unit(mine.weight, mine.channels, a.intervals), grad(mine.grad, mine.channels, a.intervals);
  const int knots = a.intervals + 1;
  const i64 first = (i64)mine.first * knots;
  const double inverse = inverse_size(unit, room), speed = a.intervals / 16.0;
  const auto gradient = [&](int c, int k) { return k < 2 ? grad.slope(k, c) : speed * grad.height(c, k - 2); };
  const auto share = [&](int c, int k) { return k < 2 ? 1.0 : inverse * unit.interval(c); };
  sum_functions(unit.channels, knots + 2, a.groups, sums, [&](int c, int k) { return gradient(c, k) * share(c, k); });
  for (int c = threadIdx.x; c < unit.channels; c += blockDim.x)
    static_cast<double *>(a.partial)[mine.first + c] = inverse * unit.interval(c);
  for (int i = threadIdx.x; i < unit.channels * (knots + 2); i += blockDim.x) {
    // Each thread writes the element that it reads, and neighbouring threads neighbouring elements.
    const int j = i - 2 * unit.channels, k = j < 0 ? i / unit.channels : j % knots + 2,
              c = j < 0 ? i % unit.channels : j / knots;
    const float value = (float)(gradient(c, k) + a.eps * share(c, k) * sums[k]);
    grad.values[2 * unit.channels + i] = value;
    if (a.sums && j >= 0) {
      static_cast<float *>(a.out)[first + j] = unit.height(c, k - 2);
      a.sums[first + j] = value;
    }
  }
}

// The factors of I + t M M' = L D L', where M M' has five diagonals; and room for one solution.
struct System {
  double *inverse, *below, *second, *solution;  // 1/D; the diagonals of L, with two zeros at the end

  __device__ System(double *memory, int knots)
      : inverse(memory), below(inverse + knots), second(below + knots + 2), solution(second + knots + 2) {}

  __device__ void factorize(double t, int knots) const {
    const int n = knots - 1;
    double previous = 0.0, last = 0.0;  // 1/D of the last two rows
    for (int k = 0; k < knots; ++k) {
      const double next_to = k > 0 ? t * (-4 + (k == 1) + (k == n)) : 0.0, two_away = k > 1 ? t : 0.0;
      second[k] = two_away * previous;
      const double rest = next_to - (k > 1 ? two_away * below[k - 1] : 0.0);
      below[k] = rest * last;
      previous = last;
      last = inverse[k] = 1.0 / (1.0 + t * (k == 0 || k == n ? 3 : 6) - second[k] * two_away - below[k] * rest);
    }
    for (int k = knots; k < knots + 2; ++k) below[k] = second[k] = 0.0;
  }

  // Solve for the right side `given`, and pass x_k to `take`, from the last to the first. `room` may be float: rounding there
  // changes M'x by no more than it would change the heights.
  template <typename T, typename F, typename G>
  __device__ void solve(int knots, T *room, F given, G take) const {
    double last = 0.0, previous = 0.0;
    for (int k = 0; k < knots; ++k) {
      const double z = given(k) - below[k] * last - second[k] * previous;
      room[k] = (T)z, previous = last, last = z;
    }
    last = previous = 0.0;
    for (int k = knots - 1; k >= 0; --k) {
      const double x = room[k] * inverse[k] - below[k + 1] * last - second[k + 2] * previous;
      previous = last, last = x;
      take(k, x);
    }
  }
};

// Return how far a constant gradient of 1 moved a parameter of the unit in the last step; 0 if this is unknown. `strength` times
// a bend is the gradient of the penalty. `before` are the heights before the step, and `gradients` those of the heights.
__device__ double measured_rate(const Arguments &a, const Unit &now, const float *before, const float *gradients,
                                double strength, double *room) {
  const int knots = a.intervals + 1;
  const double scale = a.norm ? 1.0 / *a.norm : 1.0;
  double steps = 0.0, squares = 0.0;
  for (int i = threadIdx.x; i < now.channels * knots; i += blockDim.x) {
    const int c = i / knots, k = i % knots;
    const double step = (double)now.height(c, k) - before[i], gradient = scale * gradients[i];
    const double bend = strength * now.bend(c, k);
    steps += step * step;
    squares += gradient * gradient + bend * bend;
  }
  steps = block_sum(steps, room), squares = block_sum(squares, room);
  const double rate = sqrt(steps / squares);
  return rate <= LARGEST ? rate : 0.0;
}

// Take the implicit step on the weights. `factor` is 2 bend (N/16)^4 times the rate, if that is known. Else
// `pool` points to the rate or, with `sums`, the rate is measured. Gradients have been multiplied by *norm if that is given.
__device__ void smooth(const RuleArguments &rule) {
  extern __shared__ double room[];  // one number per warp; two systems; sums of the bends
  const Arguments &a = rule.common;
  const auto mine = rule.units[blockIdx.x];
  const int knots = a.intervals + 1, size = 4 * knots + 4;
  const i64 first = (i64)mine.first * knots;
  const System system(room + blockDim.x / 32, knots), common(room + blockDim.x / 32 + size, knots);
  double *const sums = room + blockDim.x / 32 + 2 * size;
  const Unit now(mine.weight, mine.channels, a.intervals);
  const double *const w = static_cast<const double *>(a.partial) + mine.first;
  float *const memory = static_cast<float *>(a.out) + first;
  const double share = 1.0 / now.channels, common_share = share + a.eps;
  const double rate = a.pool   ? *a.pool
                      : a.sums ? measured_rate(a, now, memory, a.sums + first, a.factor * common_share, room)
                               : 1.0;
  const double t = a.factor * rate * share, common_t = a.factor * rate * common_share;
  sum_functions(now.channels, knots, a.groups, sums, [&](int c, int k) { return w[c] * now.bend(c, k); });
  if (threadIdx.x < 2) {
    const System own(threadIdx.x ? common.inverse : system.inverse, knots);
    const double own_t = threadIdx.x ? common_t : t;
    own.factorize(own_t, knots);
    own.solve(
        knots, own.solution, [&](int k) { return own_t * share * sums[k]; }, [&](int k, double x) { own.solution[k] = x; });
  }
  __syncthreads();
  for (int c = threadIdx.x; c < now.channels; c += blockDim.x) {
    const double d = now.interval(c), of_common = w[c];
    const auto change_slope = [&](int side, double change) {
      const double value = change / d;
      now.slope(side, c) = (float)(now.slope(side, c) - (fabs(value) <= LARGEST ? value : 0.0));  // if d is 0, no change
    };
    double after = 0.0, fall = 0.0;  // x_{k+1}, and x_{k+1} - x_{k+2} unless that belongs to the right slope
    system.solve(
        knots, memory + (i64)c * knots, [&](int k) { return t * now.bend(c, k); },
        [&](int k, double x) {
          x += of_common * (common.solution[k] - system.solution[k]);
          if (k == a.intervals) change_slope(1, x);
          else {
            now.height(c, k + 1) = (float)(now.height(c, k + 1) - (x - after - fall));
            fall = x - after;
          }
          after = x;
        });
    now.height(c, 0) = (float)(now.height(c, 0) + fall);
    change_slope(0, -after);
  }
}
