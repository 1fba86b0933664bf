/* The CPU kernels of PWLU: plain C11, no torch and no Python headers, called through ctypes.
 *
 * A tensor is (outer, channels, inner) in memory order: NCHW has inner = H*W, channels_last and (batch, features) have
 * inner = 1. Memory is walked in order, in blocks of up to BLOCK elements:
 *
 *   planes   inner is long, and a block lies within one channel
 *   rows     inner is short: neighbours differ in their channel, and bounds are read from arrays along the row
 *
 * In rows, float32 is done in tiles where there are vector registers: LANES rows at once, LANES positions after another.
 *
 * A block takes two passes: the segment of every element (in planes, where the table fits into vector registers, the
 * output too), then what is looked up or added there. In one pass, look-ups would wait for the segments just stored.
 *
 * Segments follow reference.py operation by operation: build with -ffp-contract=off. Sums are of doubles, in an order
 * that depends on shapes and the thread count alone: the same bits every time.
 *
 * This file includes itself twice, for REAL = float (float32, bfloat16, float16) and REAL = double.
 */
#ifndef REAL

#ifdef _MSC_VER
#pragma fp_contract(off) /* /fp:precise alone allowed contraction before 2022 */
#endif

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#define PAIRS 1 /* 128-bit registers hold the two sums of a segment, or two table entries */
#endif
#if defined(__F16C__) || (defined(_MSC_VER) && defined(__AVX2__))
#define HALF_INSTRUCTIONS 1
#endif
#ifdef _MSC_VER
#include <intrin.h>
#define EXPORT __declspec(dllexport)
#define INLINE static __forceinline
#define next_unit(counter) _InterlockedExchangeAdd64(counter, 1)
typedef volatile __int64 counter;
#else
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define next_unit(counter) __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)
typedef int64_t counter;
#endif

#ifndef PWLU_SOURCE_ID
#define PWLU_SOURCE_ID 0
#endif
EXPORT uint32_t pwlu_source_id(void) { return PWLU_SOURCE_ID; }

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum {
    BLOCK = 512,      /* elements whose segments are held at once */
    COLUMNS = 4,      /* copies of the sums in planes, so that neighbours in one segment do not wait for each other */
    TILE = 16,        /* no LANES is more than this */
    PANEL = 64,       /* positions whose tiles are done before their sums, which then stay in the first cache */
    AHEAD = 1024,     /* elements that memory is fetched ahead of the next row of tiles */
    SHORT_PLANE = 16, /* an inner size below this is done in rows */
};

/* `parallel` has the signature of GOMP_parallel, so that torch's own threads can do the work. */
typedef void (*parallel_fn)(void (*worker)(void *), void *data, unsigned threads, unsigned flags);

typedef struct job {
    int dtype, lookup;
    int64_t outer, channels, inner, intervals, segments;
    const void *x, *grad;           /* elements in */
    void *y;                        /* elements out: the output, or the gradient of x, or NULL */
    const void *parameters[5];      /* left, right, heights, left_slope, right_slope; or the four tables of a look-up */
    void *gradients[5];             /* of the same; of moments: the pool */
    void *left, *scale, *right;     /* REAL (positions): B_L, r = N/(B_R - B_L), B_R; of moments: the shift */
    int32_t *base;                  /* rows, (positions): where a position's channel begins in `table` and `sums` */
    void *table;                    /* REAL (channels, segments, 2): slope and offset */
    void *split;                    /* REAL (channels, 2, segments): the table as vectors read it, TILE longer */
    double *sums;                   /* (units, channels, segments, 2): of g and g x; of moments: x - shift, its square */
    int64_t positions;              /* channels; in rows channels * inner */
    int64_t chunk;                  /* elements a unit */
    int failed;
    unsigned threads;
    parallel_fn parallel;
    void (*body)(struct job *, int64_t unit);
    int64_t units, stop;
    counter next;
} job;

static void work(void *data) {
    job *j = data;
    for (int64_t unit = next_unit(&j->next); unit < j->stop; unit = next_unit(&j->next)) j->body(j, unit);
}

static void run(job *j, void (*body)(job *, int64_t), int64_t units) {
    const unsigned threads = (int64_t)j->threads < units ? j->threads : (unsigned)units;
    j->body = body, j->stop = units, j->next = 0;
    if (threads > 1 && j->parallel) j->parallel(work, j, threads, 0);
    else work(j);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t size_of(const job *j) { return j->outer * j->channels * j->inner; }
static inline int in_rows(const job *j) { return j->channels > 1 && j->inner < SHORT_PLANE; }
static inline int64_t first_position(const job *j, int64_t c) { return in_rows(j) ? c * j->inner : c; }
static inline int64_t channels_a_unit(const job *j) { return larger(1, 16384 / j->segments); } /* of small serial work */

/* How the work is cut: by shapes and the thread count alone, so that results repeat. */
static void plan(job *j, int summing) {
    const int64_t size = size_of(j), row = j->channels * j->inner;
    j->threads = (unsigned)smaller(j->threads, size / 32768 + 1); /* the grain of torch's own loops */
    const int64_t units = j->threads == 1 ? 1 : summing ? j->threads : 4 * (int64_t)j->threads; /* sums: memory for each */
    const int64_t align = in_rows(j) ? larger(size / row < TILE * units ? 1 : TILE, BLOCK / row) * row : BLOCK;
    j->positions = in_rows(j) ? row : j->channels;
    j->chunk = ceil_div(ceil_div(size, units), align) * align;
    j->units = ceil_div(size, j->chunk);
}

/* Conversions of bfloat16 and float16, rounding to nearest even. */
static inline uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float float_of(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

static inline uint16_t to_bfloat16(float f) {
    uint32_t u = bits_of(f);
    return f != f ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#ifndef HALF_INSTRUCTIONS
static inline float from_float16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) return float_of(sign | 0x7f800000u | magnitude); /* inf, nan */
    return float_of(sign | bits_of(float_of(magnitude) * 0x1p112f)); /* moves the exponent's bias, denormals too */
}

static inline uint16_t to_float16(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000u) { /* denormal: adding 0.5 leaves the rounded bits at the end of the mantissa */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}
#endif

static void widen(int dtype, const uint16_t *from, float *to, int n) {
    int i = 0;
    if (dtype == BFLOAT16) {
        for (; i < n; i++) to[i] = float_of((uint32_t)from[i] << 16);
        return;
    }
#ifdef HALF_INSTRUCTIONS
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(to + i, _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(from[i])));
#else
    for (; i < n; i++) to[i] = from_float16(from[i]);
#endif
}

static void narrow(int dtype, const float *from, uint16_t *to, int n) {
    int i = 0;
    if (dtype == BFLOAT16) {
        for (; i < n; i++) to[i] = to_bfloat16(from[i]);
        return;
    }
#ifdef HALF_INSTRUCTIONS
    for (; i + 4 <= n; i += 4) _mm_storel_epi64((__m128i *)(to + i), _mm_cvtps_ph(_mm_loadu_ps(from + i), 0));
    for (; i < n; i++) to[i] = (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(from[i]), 0));
#else
    for (; i < n; i++) to[i] = to_float16(from[i]);
#endif
}

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)
#define FOR_REAL(name) NAMED(name, REAL)

#define REAL float
#define LARGEST FLT_MAX
#include "cpu.c"
#undef REAL
#undef LARGEST
#define REAL double
#define LARGEST DBL_MAX
#include "cpu.c"
#undef REAL
#undef LARGEST

static int start(job *j, int summing) {
    /* places in the table are of 32 bits, and the number of intervals must be exact as a float */
    if (size_of(j) < 1 || j->segments < 1 || j->segments > 1 << 24 || j->segments > INT32_MAX / 2 / j->channels) return 2;
    plan(j, summing);
    const size_t real = j->dtype == FLOAT64 ? sizeof(double) : sizeof(float), positions = (size_t)j->positions;
    const size_t entries = 2 * (size_t)(j->channels * j->segments), sums = summing ? (size_t)j->units * entries : 0;
    char *scratch = malloc(sizeof(double) * sums + real * (2 * entries + TILE + 3 * positions) + sizeof(int32_t) * positions);
    if (!scratch) return 1;
    j->sums = (double *)scratch, j->table = j->sums + sums;
    j->split = (char *)j->table + real * entries;
    j->left = (char *)j->split + real * (entries + TILE), j->scale = (char *)j->left + real * positions;
    j->right = (char *)j->scale + real * positions, j->base = (int32_t *)((char *)j->right + real * positions);
    memset((char *)j->split + real * entries, 0, real * TILE); /* loaded, though never selected */
    if (j->dtype == FLOAT64) execute_double(j, summing);
    else execute_float(j, summing);
    free(scratch);
    return j->failed;
}

#define GEOMETRY int64_t outer, int64_t channels, int64_t inner
#define JOB(...) \
    {.dtype = dtype, .outer = outer, .channels = channels, .inner = inner, .threads = threads, .parallel = parallel, __VA_ARGS__}

/* Each returns 0, or 1 when there was no memory for its scratch, or 2 for an empty tensor or too large a table. */
EXPORT int pwlu_forward(parallel_fn parallel, unsigned threads, int dtype, const void *x, void *y, GEOMETRY,
                        int64_t intervals, const void *left, const void *right, const void *heights,
                        const void *left_slope, const void *right_slope) {
    job j = JOB(.x = x, .y = y, .intervals = intervals, .segments = intervals + 2,
                .parameters = {left, right, heights, left_slope, right_slope});
    return start(&j, 0);
}

EXPORT int pwlu_lookup(parallel_fn parallel, unsigned threads, int dtype, const void *x, void *y, GEOMETRY,
                       int64_t intervals, const void *left, const void *inv_step, const void *slopes, const void *offsets) {
    job j = JOB(.x = x, .y = y, .intervals = intervals, .segments = intervals + 2, .lookup = 1,
                .parameters = {left, inv_step, slopes, offsets});
    return start(&j, 0);
}

/* A NULL grad_x, or NULL for all gradients of the parameters, is not computed. */
EXPORT int pwlu_backward(parallel_fn parallel, unsigned threads, int dtype, const void *grad, const void *x, void *grad_x,
                         GEOMETRY, int64_t intervals, const void *left, const void *right, const void *heights,
                         const void *left_slope, const void *right_slope, void *grad_left, void *grad_right,
                         void *grad_heights, void *grad_left_slope, void *grad_right_slope) {
    job j = JOB(.x = x, .grad = grad, .y = grad_x, .intervals = intervals, .segments = intervals + 2,
                .parameters = {left, right, heights, left_slope, right_slope},
                .gradients = {grad_left, grad_right, grad_heights, grad_left_slope, grad_right_slope});
    return start(&j, grad_left != NULL);
}

/* Adds to the pool (3, channels) of REAL: count, mean, M2. */
EXPORT int pwlu_moments(parallel_fn parallel, unsigned threads, int dtype, const void *x, GEOMETRY, void *pool) {
    job j = JOB(.x = x, .segments = 1, .gradients = {pool});
    return start(&j, 1);
}

#else /* ---------------------------------------------------------------- once for each REAL */

/* An infinite input counts as the largest finite number: 0 times it is 0. NaN stays NaN. */
INLINE REAL FOR_REAL(finite)(REAL x) { return x < -LARGEST ? -LARGEST : x > LARGEST ? LARGEST : x; }

static const REAL *FOR_REAL(read)(const job *j, const void *from, int64_t at, int n, REAL *buffer) {
    if (!from) return NULL;
    if (j->dtype <= FLOAT64) return (const REAL *)from + at;
    widen(j->dtype, (const uint16_t *)from + at, (float *)buffer, n);
    return buffer;
}

/* Bounds, scale and table of channel c: reference.scale_and_open, reference.tables. */
static void FOR_REAL(prepare_channel)(job *j, int64_t c) {
    const int64_t n = j->intervals;
    const REAL *const *given = (const REAL *const *)j->parameters;
    REAL *table = (REAL *)j->table + 2 * c * j->segments;
    if (j->lookup) {
        const REAL *slopes = given[2] + c * j->segments, *offsets = given[3] + c * j->segments;
        for (int64_t s = 0; s < j->segments; s++) table[2 * s] = slopes[s], table[2 * s + 1] = offsets[s];
        ((REAL *)j->left)[c] = given[0][c], ((REAL *)j->scale)[c] = given[1][c], ((REAL *)j->right)[c] = 0;
        return;
    }
    const REAL left = given[0][c], right = given[1][c], *heights = given[2] + c * (n + 1);
    const REAL left_slope = given[3][c], right_slope = given[4][c], scale = (REAL)n / (right - left);
    const int open = scale > 0 && scale <= LARGEST; /* else nothing lies between the bounds */
    ((REAL *)j->left)[c] = left, ((REAL *)j->scale)[c] = open ? scale : 1, ((REAL *)j->right)[c] = open ? right : left;
    const double step = open ? ((double)right - left) / (double)n : 1;
    table[0] = left_slope, table[1] = (REAL)(heights[0] - (double)left * left_slope);
    for (int64_t i = 0; i < n; i++) {
        const double slope = ((double)heights[i + 1] - heights[i]) / step;
        table[2 * i + 2] = (REAL)slope, table[2 * i + 3] = (REAL)(heights[i] - (left + (double)i * step) * slope);
    }
    table[2 * n + 2] = right_slope, table[2 * n + 3] = (REAL)(heights[n] - (double)right * right_slope);
}

/* Rows: from one entry a channel to one a position, in place: from the end, since no position is before its channel. */
static void FOR_REAL(spread)(job *j) {
    for (int64_t p = j->positions - 1; p >= 0; p--) {
        const int64_t c = p / j->inner;
        ((REAL *)j->left)[p] = ((REAL *)j->left)[c];
        ((REAL *)j->scale)[p] = ((REAL *)j->scale)[c];
        ((REAL *)j->right)[p] = ((REAL *)j->right)[c];
        j->base[p] = (int32_t)(2 * c * j->segments);
    }
}

/* First pass: where in the table each element's segment is, from its channel on in planes, from the table's beginning in
 * rows (along = 1). The arithmetic of reference.segments, or, for a look-up, reference.lookup. */
INLINE void FOR_REAL(locate)(const job *j, int64_t p, const REAL *restrict x, int n, int along, int lookup, int32_t *restrict place) {
    const REAL *left = (const REAL *)j->left + p, *scale = (const REAL *)j->scale + p, *right = (const REAL *)j->right + p;
    const REAL last = (REAL)(j->intervals - 1), end = (REAL)j->intervals;
    const int32_t outside = (int32_t)j->intervals + 1, *base = j->base + p;
    for (int i = 0; i < n; i++) {
        const int k = along ? i : 0;
        const REAL t = (x[i] - left[k]) * scale[k];
        REAL clipped = t > 0 ? t : 0; /* NaN: 0 */
        clipped = clipped < last ? clipped : last;
        int32_t segment = (int32_t)clipped + 1;
        segment = (lookup ? t >= end : x[i] >= right[k]) ? outside : segment;
        segment = (lookup ? t < 0 : x[i] < left[k]) ? 0 : segment;
        place[i] = 2 * segment + (along ? base[k] : 0);
    }
}

/* out = x S + O, or, with a gradient, out = grad S. */
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

/* Second pass: sums of g and g x. The product of two floats is exact in a double. `column` is the distance between the
 * copies that neighbours use in turn: 0 in rows, where neighbours are of different channels. */
static void FOR_REAL(accumulate)(const REAL *grad, const REAL *x, const int32_t *place, int n, double *sums, int64_t column) {
    int i = 0;
#ifdef PAIRS
#define ADD(k, pair)                                                   \
    {                                                                  \
        double *sum = sums + place[i + (k)] + ((k) % COLUMNS) * column; \
        _mm_storeu_pd(sum, _mm_add_pd(_mm_loadu_pd(sum), pair));       \
    }
    if (sizeof(REAL) == sizeof(float)) {
        const __m128 largest = _mm_set1_ps(FLT_MAX), lowest = _mm_set1_ps(-FLT_MAX);
        for (; i + COLUMNS <= n; i += COLUMNS) {
            const __m128 v = _mm_min_ps(largest, _mm_max_ps(lowest, _mm_loadu_ps((const float *)x + i)));
#ifdef __AVX2__
            const __m256d g = _mm256_cvtps_pd(_mm_loadu_ps((const float *)grad + i)), p = _mm256_mul_pd(g, _mm256_cvtps_pd(v));
            const __m256d even = _mm256_unpacklo_pd(g, p), odd = _mm256_unpackhi_pd(g, p);
            ADD(0, _mm256_castpd256_pd128(even)) ADD(1, _mm256_castpd256_pd128(odd))
            ADD(2, _mm256_extractf128_pd(even, 1)) ADD(3, _mm256_extractf128_pd(odd, 1))
#else
            const __m128 g = _mm_loadu_ps((const float *)grad + i);
            const __m128d g0 = _mm_cvtps_pd(g), p0 = _mm_mul_pd(g0, _mm_cvtps_pd(v));
            const __m128d g1 = _mm_cvtps_pd(_mm_movehl_ps(g, g)), p1 = _mm_mul_pd(g1, _mm_cvtps_pd(_mm_movehl_ps(v, v)));
            ADD(0, _mm_unpacklo_pd(g0, p0)) ADD(1, _mm_unpackhi_pd(g0, p0))
            ADD(2, _mm_unpacklo_pd(g1, p1)) ADD(3, _mm_unpackhi_pd(g1, p1))
#endif
        }
    }
#undef ADD
#endif
    for (; i < n; i++) {
        double *sum = sums + place[i] + i % COLUMNS * column;
        sum[0] += grad[i], sum[1] += (double)grad[i] * FOR_REAL(finite)(x[i]);
    }
}

#if defined(__AVX2__) && !defined(LANES) /* for float, once */
/* Tables of up to REGISTER_ENTRIES segments (REGISTER_PAIRS where offsets are needed too) are held in registers, and a look-up is
 * a permutation. */
#ifdef __AVX512F__
#define LANES 16
#define PARTS 5
#define REGISTER_ENTRIES 66
#define REGISTER_PAIRS 66
#define V(name) _mm512_##name
#define where(a, is, b, then, otherwise) _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(a, b, is), then)
#define store_places(p, s) _mm512_storeu_si512(p, s)
#define as_lanes _mm512_castsi512_ps
#define as_indices _mm512_castps_si512
typedef __m512 lanes;
typedef __m512i indices;

INLINE void exchange_quads(lanes *v) {
    for (int i = 0; i < 4; i++) {
        const lanes a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee);
        const lanes c = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x44), d = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xee);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88), v[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
        v[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88), v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

INLINE lanes look_up(const lanes *table, indices s, int parts) { /* 5 bits of s choose within two registers */
    const __mmask16 high = _mm512_cmpgt_epi32_mask(s, _mm512_set1_epi32(31)), highest = _mm512_cmpgt_epi32_mask(s, _mm512_set1_epi32(63));
    lanes v = _mm512_permutex2var_ps(table[0], s, table[1]);
    if (parts > 2) v = _mm512_mask_mov_ps(v, high, _mm512_permutex2var_ps(table[2], s, table[3]));
    if (parts > 4) v = _mm512_mask_mov_ps(v, highest, _mm512_permutexvar_ps(s, table[4]));
    return v;
}
#else
#define LANES 8
#define PARTS 4
#define REGISTER_ENTRIES 32
#define REGISTER_PAIRS 16 /* beyond, two look-ups by permutation take longer than one of a pair in memory */
#define V(name) _mm256_##name
#define where(a, is, b, then, otherwise) _mm256_blendv_epi8(otherwise, then, _mm256_castps_si256(_mm256_cmp_ps(a, b, is)))
#define store_places(p, s) _mm256_storeu_si256((__m256i *)(p), s)
#define as_lanes _mm256_castsi256_ps
#define as_indices _mm256_castps_si256
typedef __m256 lanes;
typedef __m256i indices;

INLINE void exchange_quads(lanes *v) {
    for (int i = 0; i < 4; i++) {
        const lanes a = v[i], b = v[i + 4];
        v[i] = _mm256_permute2f128_ps(a, b, 0x20), v[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

INLINE lanes look_up(const lanes *table, indices s, int parts) { /* 3 bits of s choose within a register, bits 3 and 4 which */
    const lanes bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(s, 28)), bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(s, 27));
    lanes v = _mm256_permutevar8x32_ps(table[0], s), high = v;
    if (parts > 1) v = _mm256_blendv_ps(v, _mm256_permutevar8x32_ps(table[1], s), bit3);
    if (parts > 2) high = _mm256_permutevar8x32_ps(table[2], s);
    if (parts > 3) high = _mm256_blendv_ps(high, _mm256_permutevar8x32_ps(table[3], s), bit3);
    return parts > 2 ? _mm256_blendv_ps(v, high, bit4) : v;
}
#endif

/* The arithmetic of `finite` and `locate`. Of max_ps and min_ps the result is the second operand if one is NaN. */
INLINE lanes finite_lanes(lanes x) { return V(min_ps)(V(set1_ps)(FLT_MAX), V(max_ps)(V(set1_ps)(-FLT_MAX), x)); }

INLINE indices locate_lanes(lanes v, lanes left, lanes scale, lanes right, int intervals, int lookup) {
    const lanes zero = V(set1_ps)(0), last = V(set1_ps)((float)(intervals - 1)), end = V(set1_ps)((float)intervals);
    const lanes t = V(mul_ps)(V(sub_ps)(v, left), scale), compared = lookup ? t : v;
    indices s = V(add_epi32)(V(cvttps_epi32)(V(min_ps)(V(max_ps)(t, zero), last)), V(set1_epi32)(1)); /* NaN: interval 0 */
    s = where(compared, _CMP_GE_OQ, lookup ? end : right, V(set1_epi32)(intervals + 1), s);
    return where(compared, _CMP_LT_OQ, lookup ? zero : left, V(set1_epi32)(0), s);
}

INLINE void load_table(const job *j, int64_t place, lanes *slopes, lanes *offsets, int parts) {
    const float *table = (const float *)j->split + place;
    for (int k = 0; k < PARTS; k++) {
        slopes[k] = k < parts ? V(loadu_ps)(table + LANES * k) : V(set1_ps)(0);
        offsets[k] = k < parts ? V(loadu_ps)(table + j->segments + LANES * k) : V(set1_ps)(0);
    }
}

/* `locate` and `apply` in one, but for the last n % LANES elements; returns how many were done. */
INLINE int map_lanes(const job *j, int64_t c, const float *x, const float *grad, int n, float *out, int32_t *place, int lookup,
                     int parts) {
    lanes slopes[PARTS], offsets[PARTS];
    load_table(j, 2 * c * j->segments, slopes, offsets, parts);
    const lanes left = V(set1_ps)(((const float *)j->left)[c]), scale = V(set1_ps)(((const float *)j->scale)[c]);
    const lanes right = V(set1_ps)(((const float *)j->right)[c]);
    const int intervals = (int)j->intervals;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const lanes v = finite_lanes(V(loadu_ps)(x + i));
        const indices s = locate_lanes(v, left, scale, right, intervals, lookup);
        if (grad) store_places(place + i, V(slli_epi32)(s, 1));
        if (!out) continue;
        const lanes slope = look_up(slopes, s, parts);
        if (grad) V(storeu_ps)(out + i, V(mul_ps)(V(loadu_ps)(grad + i), slope));
        else V(storeu_ps)(out + i, V(add_ps)(V(mul_ps)(v, slope), look_up(offsets, s, parts)));
    }
    return i;
}

static int map_vectors(const job *j, int64_t c, const float *x, const float *grad, int n, float *out, int32_t *place) {
#define CASE(parts)                                                                \
    case parts:                                                                    \
        if (grad) return map_lanes(j, c, x, grad, n, out, place, 0, parts);        \
        if (j->lookup) return map_lanes(j, c, x, NULL, n, out, place, 1, parts);   \
        return map_lanes(j, c, x, NULL, n, out, place, 0, parts);
    switch (ceil_div(j->segments, LANES)) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) }
#undef CASE
    return 0;
}

INLINE void transpose(lanes *v) {
    for (int i = 0; i < LANES; i += 4) {
        const lanes a = V(unpacklo_ps)(v[i], v[i + 2]), b = V(unpackhi_ps)(v[i], v[i + 2]);
        const lanes c = V(unpacklo_ps)(v[i + 1], v[i + 3]), d = V(unpackhi_ps)(v[i + 1], v[i + 3]);
        v[i] = V(unpacklo_ps)(a, c), v[i + 1] = V(unpackhi_ps)(a, c);
        v[i + 2] = V(unpacklo_ps)(b, d), v[i + 3] = V(unpackhi_ps)(b, d);
    }
    exchange_quads(v);
}

/* One tile, whose first element is `at`, at position p. Transposed, a register holds elements of one position, and a
 * look-up is a permutation. With parts = 0 only the places are found. */
INLINE void map_tile(const job *j, int64_t p, int64_t at, int32_t *place, int backward, int lookup, int parts) {
    const int64_t row = j->positions;
    const int intervals = (int)j->intervals;
    const float *x = (const float *)j->x + at, *left = (const float *)j->left + p;
    const float *scale = (const float *)j->scale + p, *right = (const float *)j->right + p;
    lanes v[LANES], slopes[PARTS], offsets[PARTS];
    for (int r = 0; r < LANES; r++) v[r] = V(loadu_ps)(x + r * row);
    if (backward || !parts) {
        const lanes l = V(loadu_ps)(left), m = V(loadu_ps)(scale), h = V(loadu_ps)(right);
        const indices base = as_indices(V(loadu_ps)((const float *)(j->base + p)));
        for (int r = 0; r < LANES; r++) {
            const indices s = locate_lanes(v[r], l, m, h, intervals, lookup);
            store_places(place + r * (PANEL + LANES), V(add_epi32)(V(slli_epi32)(s, 1), base));
            v[r] = as_lanes(s);
        }
    }
    if (!j->y || !parts) return;
    transpose(v);
    for (int c = 0; c < LANES; c++) {
        load_table(j, j->base[p + c], slopes, offsets, parts);
        if (backward) {
            v[c] = look_up(slopes, as_indices(v[c]), parts);
            continue;
        }
        const indices s = locate_lanes(v[c], V(set1_ps)(left[c]), V(set1_ps)(scale[c]), V(set1_ps)(right[c]), intervals, lookup);
        v[c] = V(add_ps)(V(mul_ps)(finite_lanes(v[c]), look_up(slopes, s, parts)), look_up(offsets, s, parts));
    }
    transpose(v);
    for (int r = 0; r < LANES; r++) {
        if (backward) v[r] = V(mul_ps)(V(loadu_ps)((const float *)j->grad + at + r * row), v[r]);
        V(storeu_ps)((float *)j->y + at + r * row, v[r]);
    }
}

INLINE void fetch(const float *p) { /* as much memory as a tile, cache line by cache line */
    for (int i = 0; i < LANES * LANES; i += 16) _mm_prefetch((const char *)(p + i), _MM_HINT_T1);
}

/* LANES rows from `begin` on. Sums are taken along the rows: a segment of one channel would wait for itself. Processors do not
 * foresee this order, and memory is fetched ahead of it, the output too, into the second cache: the first holds the sums. */
INLINE void map_tiles(const job *j, int64_t begin, double *sums, int backward, int lookup, int parts) {
    const int64_t row = j->positions;
    const float *x = (const float *)j->x + begin, *grad = backward ? (const float *)j->grad + begin : NULL;
    float *y = j->y ? (float *)j->y + begin : NULL;
    int32_t place[LANES * (PANEL + LANES)];
    for (int64_t first = 0, stop; first < row; first = stop) {
        stop = smaller(first + PANEL, row);
        for (int64_t q = first; q < stop; q += LANES) {
            const int64_t p = smaller(q, row - LANES), next = (row + q) * LANES + AHEAD; /* the last tile may overlap another */
            fetch(x + next);
            if (backward) fetch(grad + next);
            if (y) fetch(y + next);
            map_tile(j, p, begin + p, place + LANES + (p - first), backward, lookup, parts);
        }
        for (int r = 0; r < LANES; r++) {
            const int32_t *places = place + r * (PANEL + LANES) + LANES;
            const int64_t i = r * row + first;
            if (!parts && y) apply_float(j->table, x + i, backward ? grad + i : NULL, places, (int)(stop - first), y + i);
            if (sums) accumulate_float(grad + i, x + i, places, (int)(stop - first), sums, 0);
        }
    }
}

static void map_rows(const job *j, int64_t begin, double *sums) {
    const int in_memory = j->segments > (j->grad ? REGISTER_ENTRIES : REGISTER_PAIRS);
#define CASE(parts)                                                       \
    case parts:                                                           \
        if (j->grad) map_tiles(j, begin, sums, 1, 0, parts);              \
        else if (j->lookup) map_tiles(j, begin, NULL, 0, 1, parts);       \
        else map_tiles(j, begin, NULL, 0, 0, parts);                      \
        break;
    switch (in_memory ? 0 : ceil_div(j->segments, LANES)) { CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) }
#undef CASE
}
#endif

/* Moments: sums of x - shift and of its square. The shift, a channel's first element, keeps the squares small. */
static void FOR_REAL(moments)(const job *j, int64_t p, const REAL *x, int n, double *sums) {
    const REAL *shift = (const REAL *)j->left + p;
    if (in_rows(j)) {
        for (int i = 0; i < n; i++) {
            const double v = (double)x[i] - shift[i];
            sums[j->base[p + i]] += v, sums[j->base[p + i] + 1] += v * v;
        }
        return;
    }
    double first[8] = {0}, second[8] = {0};
    for (int i = 0; i < n; i += 8)
        for (int k = 0; k < 8 && i + k < n; k++) {
            const double v = (double)x[i + k] - shift[0];
            first[k] += v, second[k] += v * v;
        }
    for (int k = 0; k < 8; k++) sums[0] += first[k], sums[1] += second[k];
}

/* Elements [at, at + n) of x: one block. In rows it may go over the end of a row into the next ones. */
static void FOR_REAL(block)(const job *j, int64_t at, int n, int64_t p, double *sums, int64_t column) {
    REAL x_buffer[BLOCK], grad_buffer[BLOCK], out_buffer[BLOCK];
    int32_t place[BLOCK];
    const int rows = in_rows(j), direct = j->dtype <= FLOAT64;
    const REAL *x = FOR_REAL(read)(j, j->x, at, n, x_buffer), *grad = FOR_REAL(read)(j, j->grad, at, n, grad_buffer);
    const REAL *table = (const REAL *)j->table + (rows ? 0 : 2 * p * j->segments);
    REAL *out = !j->y ? NULL : direct ? (REAL *)j->y + at : out_buffer;
    int done = 0;
#ifdef LANES
    if (!rows && sizeof(REAL) == sizeof(float) && j->segments <= (grad ? REGISTER_ENTRIES : REGISTER_PAIRS))
        done = map_vectors(j, p, (const float *)x, (const float *)grad, n, (float *)out, place);
#endif
    for (int i = done, m; i < n; i += m, p = 0) {
        m = rows ? (int)smaller(n - i, j->positions - p) : n - i;
        if (rows && j->lookup) FOR_REAL(locate)(j, p, x + i, m, 1, 1, place + i);
        else if (rows) FOR_REAL(locate)(j, p, x + i, m, 1, 0, place + i);
        else if (j->lookup) FOR_REAL(locate)(j, p, x + i, m, 0, 1, place + i);
        else FOR_REAL(locate)(j, p, x + i, m, 0, 0, place + i);
    }
    if (out && done < n) FOR_REAL(apply)(table, x + done, grad ? grad + done : NULL, place + done, n - done, out + done);
    if (sums) FOR_REAL(accumulate)(grad, x, place, n, sums, column);
    if (out && !direct) narrow(j->dtype, (const float *)out, (uint16_t *)j->y + at, n);
}

/* Elements [at, stop) of one plane, or of whole rows. */
static void FOR_REAL(span)(const job *j, int64_t at, int64_t stop, int64_t p, double *sums, int64_t column) {
    REAL buffer[BLOCK];
#ifdef LANES
    if (in_rows(j) && j->dtype == FLOAT32 && j->intervals && LANES * j->positions >= BLOCK / 2) /* else places are used too soon */
        for (; stop - at >= LANES * j->positions; at += LANES * j->positions) map_rows(j, at, sums);
#endif
    for (int n; at < stop; at += n) {
        n = (int)smaller(BLOCK, stop - at);
        if (j->intervals) FOR_REAL(block)(j, at, n, in_rows(j) ? at % j->positions : p, sums, column);
        else for (int64_t i = 0, m; i < n; i += m) { /* moments: row by row */
            const int64_t position = in_rows(j) ? (at + i) % j->positions : p;
            m = in_rows(j) ? smaller(n - i, j->positions - position) : n;
            FOR_REAL(moments)(j, position, FOR_REAL(read)(j, j->x, at + i, (int)m, buffer), (int)m, sums);
        }
    }
}

/* One unit: a stretch of memory. In planes the sums of a plane are taken in COLUMNS copies and then added to its channel. */
static void FOR_REAL(map)(job *j, int64_t unit) {
    const int64_t end = smaller(size_of(j), (unit + 1) * j->chunk);
    for (int64_t at = unit * j->chunk, stop; at < end; at = stop) {
        stop = in_rows(j) ? end : smaller(end, (at / j->inner + 1) * j->inner);
        FOR_REAL(span)(j, at, stop, at / j->inner % j->channels, NULL, 0);
    }
}

static void FOR_REAL(sum)(job *j, int64_t unit) {
    const int64_t end = smaller(size_of(j), (unit + 1) * j->chunk), column = 2 * j->segments;
    const int copies = j->inner >= 8 * j->segments; /* else clearing and adding them would take longer than they save */
    double *sums = j->sums + unit * j->channels * column, *columns = malloc(sizeof(double) * COLUMNS * (size_t)column);
    if (!columns) {
        j->failed = 1;
        return;
    }
    memset(sums, 0, sizeof(double) * (size_t)(j->channels * column));
    if (in_rows(j)) FOR_REAL(span)(j, unit * j->chunk, end, 0, sums, 0);
    else for (int64_t at = unit * j->chunk, stop; at < end; at = stop) {
        const int64_t plane = at / j->inner;
        stop = smaller(end, (plane + 1) * j->inner);
        double *total = sums + plane % j->channels * column;
        if (copies) memset(columns, 0, sizeof(double) * COLUMNS * (size_t)column);
        FOR_REAL(span)(j, at, stop, plane % j->channels, copies ? columns : total, copies ? column : 0);
        for (int k = 0; copies && k < COLUMNS; k++)
            for (int64_t s = 0; s < column; s++) total[s] += columns[k * column + s];
    }
    free(columns);
}

/* The sums of channel c over all units, left in the first. */
static const double *FOR_REAL(total)(job *j, int64_t c) {
    double *total = j->sums + 2 * c * j->segments;
    for (int64_t unit = 1; unit < j->units; unit++)
        for (int64_t s = 0; s < 2 * j->segments; s++) total[s] += total[2 * unit * j->channels * j->segments + s];
    return total;
}

/* Adds the moments of channel c to the pool: reference.merge, each operation rounded as there. */
static void FOR_REAL(finish_moments)(job *j, int64_t c) {
    const double *total = FOR_REAL(total)(j, c), mean = total[0] / (double)(j->outer * j->inner);
    const double m2 = total[1] - total[0] * mean;
    REAL *pool = (REAL *)j->gradients[0] + c, *pool_mean = pool + j->channels, *pool_m2 = pool_mean + j->channels;
    const REAL n_1 = *pool, n_2 = (REAL)(j->outer * j->inner), n = n_1 + n_2, share = n_2 / (n < 1 ? 1 : n);
    const REAL distance = (REAL)(((REAL *)j->left)[first_position(j, c)] + mean) - *pool_mean;
    *pool = n, *pool_mean += distance * share;
    *pool_m2 = *pool_m2 + (REAL)(m2 < 0 ? 0 : m2) + distance * n_1 * (distance * share);
}

/* From sums to gradients: reference.backward, a channel. */
static void FOR_REAL(finish_gradients)(job *j, int64_t c) {
    const int64_t n = j->intervals, p = first_position(j, c);
    const double *total = FOR_REAL(total)(j, c) + 2;
    const REAL *const *given = (const REAL *const *)j->parameters;
    REAL *const *gradients = (REAL *const *)j->gradients;
    const double left = given[0][c], right = given[1][c], left_slope = given[3][c], right_slope = given[4][c];
    const REAL *heights = given[2] + c * (n + 1);
    const int open = ((const REAL *)j->right)[p] != ((const REAL *)j->left)[p];
    const double step = open ? (right - left) / (double)n : 1;
    double grad_left = -left_slope * total[-2], grad_right = -right_slope * total[2 * n], height = total[-2];
    for (int64_t i = 0; i < n; i++) {
        const double g = total[2 * i], share = (total[2 * i + 1] - (left + (double)i * step) * g) / step; /* sum g (x - B_i)/d */
        const double slope = ((double)heights[i + 1] - heights[i]) / step;
        grad_left += slope * (share + (double)(i - n) * g) / (double)n;
        grad_right -= slope * (share + (double)i * g) / (double)n;
        gradients[2][c * (n + 1) + i] = (REAL)(height + g - share);
        height = share;
    }
    gradients[2][c * (n + 1) + n] = (REAL)(height + total[2 * n]);
    gradients[0][c] = (REAL)grad_left, gradients[1][c] = (REAL)grad_right;
    gradients[3][c] = (REAL)(total[-1] - left * total[-2]), gradients[4][c] = (REAL)(total[2 * n + 1] - right * total[2 * n]);
}

static void FOR_REAL(prepare)(job *j, int64_t unit) {
    const int64_t first = unit * channels_a_unit(j), stop = smaller(j->channels, first + channels_a_unit(j));
    for (int64_t c = first; c < stop; c++) {
        const REAL *table = (const REAL *)j->table + 2 * c * j->segments;
        REAL *split = (REAL *)j->split + 2 * c * j->segments;
        if (j->intervals) FOR_REAL(prepare_channel)(j, c);
        if (j->intervals)
            for (int64_t s = 0; s < j->segments; s++) split[s] = table[2 * s], split[j->segments + s] = table[2 * s + 1];
        if (!j->intervals) ((REAL *)j->left)[c] = *FOR_REAL(read)(j, j->x, c * j->inner, 1, (REAL *)j->left + c);
    }
}

static void FOR_REAL(finish)(job *j, int64_t unit) {
    const int64_t first = unit * channels_a_unit(j), stop = smaller(j->channels, first + channels_a_unit(j));
    for (int64_t c = first; c < stop; c++) {
        if (j->intervals) FOR_REAL(finish_gradients)(j, c);
        else FOR_REAL(finish_moments)(j, c);
    }
}

static void FOR_REAL(execute)(job *j, int summing) {
    run(j, FOR_REAL(prepare), ceil_div(j->channels, channels_a_unit(j)));
    if (in_rows(j)) FOR_REAL(spread)(j);
    run(j, summing ? FOR_REAL(sum) : FOR_REAL(map), j->units);
    if (summing && !j->failed) run(j, FOR_REAL(finish), ceil_div(j->channels, channels_a_unit(j)));
}
#endif
