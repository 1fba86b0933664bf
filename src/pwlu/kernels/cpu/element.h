/* Process elements without the intrinsics of lanes.h, for one REAL: find segments, apply lines, add to the sums. */

/* Replace infinities by the largest finite numbers, so that a slope of 0 gives 0. NaN stays NaN. */
INLINE REAL FOR_REAL(finite)(REAL x) { return x < -LARGEST ? -LARGEST : x > LARGEST ? LARGEST : x; }

/* Return the address of n elements as REAL: the original memory if possible, else a converted copy in the buffer. */
static const REAL *FOR_REAL(read)(const job *j, const void *from, int64_t at, int n, REAL *buffer) {
    if (!from) return NULL;
    if (j->dtype <= FLOAT64) return (const REAL *)from + at;
    widen(j->dtype, (const uint16_t *)from + at, (float *)buffer, n);
    return buffer;
}

/* Return the address of `count` rows of n elements as REAL, from `at` on. The distance between rows is `positions` in the
 * original memory, and WIDTH in the buffer. */
static const REAL *FOR_REAL(read_rows)(const job *j, const void *from, int64_t at, int count, int n, REAL *buffer) {
    const REAL *first = FOR_REAL(read)(j, from, at, n, buffer);
    for (int r = 1; r < count && first == buffer; r++) FOR_REAL(read)(j, from, at + r * j->positions, n, buffer + r * WIDTH);
    return first;
}

/* Store the place of the segment of each element in the table, as reference.segments or (with LOOKUP) reference.lookup finds
 * it. In planes, all elements share the bounds and the base of their channel. In rows (along = 1), each element has its own. */
INLINE void FOR_REAL(locate)(const job *j, int64_t p, const int32_t *base, const REAL *restrict x, int n, int along, int form,
                             int32_t *restrict place) {
    const int lookup = form == LOOKUP;
    const REAL *left = (const REAL *)j->left + p, *scale = (const REAL *)j->scale + p, *right = (const REAL *)j->right + p;
    const REAL last = (REAL)(j->intervals - 1), end = (REAL)j->intervals;
    const int32_t outside = (int32_t)j->intervals + 1;
    for (int i = 0; i < n; i++) {
        const int k = along ? i : 0;
        const REAL t = (x[i] - left[k]) * scale[k];
        REAL clipped = t > 0 ? t : 0; /* 0 for NaN */
        clipped = clipped < last ? clipped : last;
        int32_t segment = (int32_t)clipped + 1;
        segment = (lookup ? t >= end : x[i] >= right[k]) ? outside : segment;
        segment = (lookup ? t < 0 : x[i] < left[k]) ? 0 : segment;
        place[i] = 2 * segment + base[k];
    }
}

/* Return the number of knots that are not greater than x, among `count` knots in order: 0 for NaN. */
INLINE int32_t FOR_REAL(search)(const REAL *knots, int32_t count, REAL x) {
    int32_t found = 0;
    for (int32_t half; count > 0; count -= half) {
        half = (count + 1) / 2;
        found += x >= knots[found + half - 1] ? half : 0;
    }
    return found;
}

/* Do `locate` with KNOTS, as nonuniform_reference.segments does. */
static void FOR_REAL(locate_knots_in_plane)(const job *j, int64_t c, int32_t base, const REAL *restrict x, int n,
                                            int32_t *restrict place) {
    const REAL *restrict knots = (const REAL *)j->knots + c * j->segments;
    const int32_t count = (int32_t)j->intervals + 1;
    if (count > FEW_KNOTS) {
        for (int i = 0; i < n; i++) place[i] = 2 * FOR_REAL(search)(knots, count, x[i]) + base;
        return;
    }
    for (int i = 0; i < n; i++) place[i] = base;
    for (int32_t k = 0; k < count; k++)
        for (int i = 0; i < n; i++) place[i] += x[i] >= knots[k] ? 2 : 0;
}

static void FOR_REAL(locate_knots_in_row)(const job *j, int64_t p, const REAL *x, int n, int32_t *place) {
    for (int i = 0; i < n; i++) {
        const int32_t base = j->base[p + i];
        place[i] = 2 * FOR_REAL(search)((const REAL *)j->knots + base / 2, (int32_t)j->intervals + 1, x[i]) + base;
    }
}

static void FOR_REAL(locate_plane)(const job *j, int64_t c, int32_t base, const REAL *x, int n, int32_t *place) {
    if (j->form == KNOTS) FOR_REAL(locate_knots_in_plane)(j, c, base, x, n, place);
    else if (j->form == LOOKUP) FOR_REAL(locate)(j, c, &base, x, n, 0, LOOKUP, place);
    else FOR_REAL(locate)(j, c, &base, x, n, 0, UNIFORM, place);
}

#ifndef VECTORS
/* Add the sums of g and of g (x - shift) to sums[0] and sums[1]. Without g, add those of x - shift and of its square. */
INLINE void FOR_REAL(sums_of)(const REAL *g, const REAL *x, REAL shift, int n, double *sums) {
    enum { COPIES = 8 };
    double first[COPIES] = {0}, second[COPIES] = {0};
    for (int i = 0; i < n; i += COPIES)
        for (int k = 0; k < COPIES && i + k < n; k++) {
            const double centred = (double)x[i + k] - shift, value = g ? g[i + k] : centred;
            first[k] += value, second[k] += value * centred;
        }
    for (int k = 0; k < COPIES; k++) sums[0] += first[k], sums[1] += second[k];
}

/* Compute the same two sums over `count` rows for each of n positions, in totals[i] and totals[WIDTH + i]. */
INLINE void FOR_REAL(sums_of_rows)(const REAL *g, int64_t g_row, const REAL *x, int64_t x_row, const REAL *shift, int count,
                                   int n, double *totals) {
    for (int i = 0; i < n; i++) totals[i] = totals[WIDTH + i] = 0;
    for (int r = 0; r < count; r++)
        for (int i = 0; i < n; i++) {
            const double centred = (double)x[r * x_row + i] - shift[i], value = g ? g[r * g_row + i] : centred;
            totals[i] += value, totals[WIDTH + i] += value * centred;
        }
}

static void FOR_REAL(locate_row)(const job *j, int64_t p, const REAL *x, int n, int32_t *place) {
    if (j->form == KNOTS) FOR_REAL(locate_knots_in_row)(j, p, x, n, place);
    else if (j->form == LOOKUP) FOR_REAL(locate)(j, p, j->base + p, x, n, 1, LOOKUP, place);
    else FOR_REAL(locate)(j, p, j->base + p, x, n, 1, UNIFORM, place);
}
#endif

/* Compute out = x S + O or, with a gradient, out = grad S. S is the slope and O the offset of the segment. */
static void FOR_REAL(apply)(const REAL *table, const REAL *x, const REAL *grad, const int32_t *place, int n, REAL *out) {
    int i = 0;
    if (grad) {
        for (; i < n; i++) out[i] = grad[i] * table[place[i]];
        return;
    }
#ifdef PAIRS
    if (sizeof(REAL) == sizeof(float)) {
        const __m128 largest = _mm_set1_ps(FLT_MAX), lowest = _mm_set1_ps(-FLT_MAX);
        for (; i + 4 <= n; i += 4) {
#define ENTRY(k) ((const double *)(table + place[i + k]))
            const __m128 a = _mm_castpd_ps(_mm_loadh_pd(_mm_load_sd(ENTRY(0)), ENTRY(1)));
            const __m128 b = _mm_castpd_ps(_mm_loadh_pd(_mm_load_sd(ENTRY(2)), ENTRY(3)));
#undef ENTRY
            const __m128 v = _mm_min_ps(largest, _mm_max_ps(lowest, _mm_loadu_ps((const float *)x + i)));
            const __m128 slope = _mm_shuffle_ps(a, b, 0x88), offset = _mm_shuffle_ps(a, b, 0xdd);
            _mm_storeu_ps((float *)out + i, _mm_add_ps(_mm_mul_ps(v, slope), offset));
        }
    }
#endif
    for (; i < n; i++) out[i] = FOR_REAL(finite)(x[i]) * table[place[i]] + table[place[i] + 1];
}

/* Add g and g x to the sums of each segment. The product of two floats is exact in double. `step` is the distance between the
 * entries of `place` for two neighbours. Neighbours in one channel use copies of the sums in turn; `column` is the distance
 * between two copies, and 0 if there are none. */
INLINE void FOR_REAL(accumulate)(const REAL *grad, const REAL *x, const int32_t *place, int step, int n, double *sums,
                                 int64_t column) {
    int i = 0;
#ifdef PAIRS
#define ADD(k, pair) \
    { \
        double *sum = sums + place[(i + (k)) * step] + ((k) % COLUMNS) * column; \
        _mm_storeu_pd(sum, _mm_add_pd(_mm_loadu_pd(sum), pair)); \
    }
    if (sizeof(REAL) == sizeof(float)) {
        const __m128 largest = _mm_set1_ps(FLT_MAX), lowest = _mm_set1_ps(-FLT_MAX);
        for (; i + COLUMNS <= n; i += COLUMNS) {
            const __m128 v = _mm_min_ps(largest, _mm_max_ps(lowest, _mm_loadu_ps((const float *)x + i)));
#ifdef __AVX2__
            const __m256d g = _mm256_cvtps_pd(_mm_loadu_ps((const float *)grad + i)), p = _mm256_mul_pd(g, _mm256_cvtps_pd(v));
            const __m256d even = _mm256_unpacklo_pd(g, p), odd = _mm256_unpackhi_pd(g, p);
            ADD(0, _mm256_castpd256_pd128(even))
            ADD(1, _mm256_castpd256_pd128(odd)) ADD(2, _mm256_extractf128_pd(even, 1)) ADD(3, _mm256_extractf128_pd(odd, 1))
#else
            const __m128 g = _mm_loadu_ps((const float *)grad + i);
            const __m128d g0 = _mm_cvtps_pd(g), p0 = _mm_mul_pd(g0, _mm_cvtps_pd(v));
            const __m128d g1 = _mm_cvtps_pd(_mm_movehl_ps(g, g)), p1 = _mm_mul_pd(g1, _mm_cvtps_pd(_mm_movehl_ps(v, v)));
            ADD(0, _mm_unpacklo_pd(g0, p0))
            ADD(1, _mm_unpackhi_pd(g0, p0)) ADD(2, _mm_unpacklo_pd(g1, p1)) ADD(3, _mm_unpackhi_pd(g1, p1))
#endif
        }
    }
#undef ADD
#endif
    for (; i < n; i++) {
        double *sum = sums + place[i * step] + i % COLUMNS * column;
        sum[0] += grad[i], sum[1] += (double)grad[i] * FOR_REAL(finite)(x[i]);
    }
}
