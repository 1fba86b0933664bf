// Which elements a block and a thread process, and the tables of lines that they need. plan.py chooses the sizes.

// The planes of one channel that a block processes, as one sequence of vectors. Blocks are (channel, split, piece of a plane).
// Split s of S has the planes s, s + S, ..., so that all blocks together read memory in order.
template <int W>
struct Stretch {
  i64 base, stride;
  int count;
  unsigned units, magic, shift;  // vectors per plane, and division by this number

  __device__ Stretch(const Arguments &a) {
    const i64 start = (i64)blockIdx.z * a.piece, of_plane = a.inner / W;
    const i64 planes = a.of_split + (blockIdx.y < a.outer - a.of_split * gridDim.y ? 1 : 0);
    base = ((i64)blockIdx.y * a.channels + blockIdx.x) * of_plane + start;
    stride = (i64)gridDim.y * a.channels * of_plane;
    count = (int)(planes * max(min((i64)a.piece, of_plane - start), (i64)0));
    units = (unsigned)of_plane, magic = a.magic, shift = a.shift;
  }

  // Return the index of vector i. magic is 0 if every block has one plane or a piece of one.
  __device__ i64 at(unsigned i) const {
    if (magic == 0) return base + i;
    const unsigned plane = (__umulhi(i, magic) + i) >> shift;
    return base + plane * stride + (i - plane * units);
  }
};

// The vectors that a thread processes, one per row. Blocks are (panel of `width` vectors, split). The threads of a block
// process `rows` rows at a time, and the splits follow each other, so that all blocks together read memory in order. A row
// holds all channels, with `inner` elements each. A panel holds complete channels. If inner is 1 (channels_last), the W
// elements of a vector belong to W channels; else (MIXED) they belong to at most two. Shared memory holds the tables of the
// panel's channels as [line][place]. Channel c of the panel has place c or, if inner is 1, a place such that neighbouring
// threads read neighbouring places.
#define PANEL 32  // maximum number of vectors across if inner is 1
template <int W, bool MIXED>
struct Panel {
  int across, down, rows, first_channel, channels, places, count;
  int channel[W], place[W];  // of each element of a vector
  i64 start;        // the index of the first vector of this thread
  unsigned stride;  // the distance to the next: in 32 bits, an address takes one instruction instead of three

  __device__ Panel(const Arguments &a) {
    across = threadIdx.x % a.width, down = threadIdx.x / a.width, rows = blockDim.x / a.width;
    const unsigned inner = (unsigned)a.inner, length = a.channels * inner;  // of a row
    const unsigned begin = blockIdx.x * a.width * W, mine = begin + across * W;
    const bool active = mine < length && down < rows;
    first_channel = MIXED ? begin / inner : begin;
    channels = min(MIXED ? a.width * W / inner : a.width * W, a.channels - first_channel);
    places = a.places;
    unsigned within = MIXED ? across * W / inner : across * W, rest = MIXED ? across * W - within * inner : 0;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      channel[j] = active ? first_channel + (int)within : first_channel;
      place[j] = MIXED ? (active ? within : 0) : j * PANEL + across;
      if (!MIXED || ++rest == inner) ++within, rest = 0;
    }
    const i64 first = (i64)blockIdx.y * rows + down;
    const unsigned apart = gridDim.y * rows;
    count = active ? (int)a.of_split + (first + a.of_split * apart < a.outer ? 1 : 0) : 0;
    start = first * (length / W) + mine / W;
    stride = apart * (length / W);
  }
  __device__ int place_of(int c) const { return MIXED ? c : c % W * PANEL + c / W; }
};

// Copy the rows of a table (C, length) to shared memory. There, the rows have an odd length, so that threads that read down a
// column access different banks. A warp has eight loads in flight.
template <int W, bool MIXED>
__device__ void stage(const Arguments &a, const void *array, const Panel<W, MIXED> &panel, int length, float *to) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int k = threadIdx.x % 32; k < length; k += 32)
    for (int c = warp; c < panel.channels; c += 8 * warps) {
      float values[8];
#pragma unroll
      for (int u = 0; u < 8; ++u)
        if (c + u * warps < panel.channels)
          values[u] = read(array, (i64)(panel.first_channel + c + u * warps) * length + k, a.kind);
#pragma unroll
      for (int u = 0; u < 8; ++u)
        if (c + u * warps < panel.channels) to[(c + u * warps) * (length | 1) + k] = values[u];
    }
}

// Do the same for the mixed heights of a dynamic unit.
template <int W, bool MIXED>
__device__ void stage_mixed(const Arguments &a, const Panel<W, MIXED> &panel, float *to) {
  const int length = a.intervals + 1, count = panel.channels * length, threads = blockDim.x;
  for (int first = threadIdx.x; first < count; first += 8 * threads) {
    int channel[8], k[8];
    float values[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const int at = min(first + u * threads, count - 1), c = at / length;
      channel[u] = panel.first_channel + c, k[u] = at - c * length;
    }
    read_heights<DYNAMIC>(a, channel, k, values);
#pragma unroll
    for (int u = 0; u < 8; ++u)
      if (first + u * threads < count) to[(channel[u] - panel.first_channel) * (length | 1) + k[u]] = values[u];
  }
}

// Call put(line, place, (S, P), origin) for every line of every channel of a panel; the origin is for KNOTS. `room` is shared
// memory for channels x (N + 1 | 1) floats, twice as many with KNOTS. MIXED does not need it: there are few channels, so each
// thread computes single lines.
template <int KIND, int W, bool MIXED, typename Put>
__device__ void lines_of_panel(const Arguments &a, const Panel<W, MIXED> &panel, float *room, const Put &put) {
  const int n = a.intervals, lines = LINES(KIND, n);
  if (MIXED) {
#pragma unroll 4
    for (int i = threadIdx.x; i < panel.channels * lines; i += blockDim.x) {
      const int c = i / lines, k = i % lines, channel = panel.first_channel + c;
      put(k, c, line<KIND>(a, channel, k, finder<KIND>(a, channel, 0, 0)), (KIND & KNOTS) ? origin(a, channel, k) : 0.0f);
    }
    return;
  }
  const auto get = [&](int which, int c) {
    return read(a.parameters[which], function_of<KIND>(a, panel.first_channel + min(c, panel.channels - 1)), a.kind);
  };
  if (KIND & KNOTS) {
    const int row = (n + 1) | 1;
    float *room_for_knots = room + panel.channels * row;
    stage(a, a.parameters[2], panel, n + 1, room);
    stage(a, a.parameters[0], panel, n + 1, room_for_knots);
    __syncthreads();
    for (int c = threadIdx.x; c < panel.channels; c += blockDim.x) {
      const float *heights = room + c * row, *knots = room_for_knots + c * row;
      float slope = get(3, c), begin = knots[0], before = heights[0];
      for (int k = 0; k < lines; ++k) {
        const float end = knots[min(k, n)], after = heights[min(k, n)];
        if (k == lines - 1) slope = get(4, c);
        put(k, panel.place_of(c), line(n, k, begin, end, before, after, slope), begin);
        begin = end, before = after;
      }
    }
    return;
  }
  int c = threadIdx.x;  // load the other parameters of its first channel while the heights are copied
  float left = get(0, c), right = get(1, c), left_slope = get(3, c), right_slope = get(4, c);
  if (KIND & DYNAMIC) stage_mixed(a, panel, room);
  else stage(a, a.parameters[2], panel, n + 1, room);
  __syncthreads();
  while (c < panel.channels) {
    const int place = panel.place_of(c);
    const Bounds b(left, right, n);
    const float *heights = room + c * ((n + 1) | 1);
    put(0, place, line(n, 0, b, right - left, heights[0], heights[0], left_slope), 0.0f);
    put(n + 2, place, line(n, n + 2, b, right - left, heights[n], heights[n], right_slope), 0.0f);
    float before = heights[0];
#pragma unroll 4
    for (int k = 1; k <= n; ++k) {
      const float after = heights[k];
      put(k, place, line_inside(b, k, before, after), 0.0f);
      before = after;
    }
    put(n + 1, place, line_inside(b, n, heights[n - 1], heights[n]), 0.0f);
    c += blockDim.x;
    if (c < panel.channels) left = get(0, c), right = get(1, c), left_slope = get(3, c), right_slope = get(4, c);
  }
}

// Run a kernel with DYNAMIC on sample blockIdx.z. The numbers are those of one sample.
template <typename T, void (*KERNEL)(const Arguments &)>
__device__ void per_sample(const Arguments &all) {
  const i64 sample = blockIdx.z, functions = sample * all.channels, elements = sample * all.outer * all.channels * all.inner;
  Arguments a = all;
  a.x = static_cast<const Vector<T, 1> *>(all.x) + elements;
  a.grad = static_cast<const Vector<T, 1> *>(all.grad) + elements;
  a.out = static_cast<Vector<T, 1> *>(all.out) + elements;
  a.first = (int)functions;
  a.partial = static_cast<float2 *>(all.partial) + functions * all.splits * LINES(0, all.intervals);
  KERNEL(a);
}
