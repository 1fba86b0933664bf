/* A job: the work of one call, and how threads share it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _MSC_VER
#include <intrin.h>
#define EXPORT __declspec(dllexport)
#define INLINE static __forceinline
#define next_unit(counter) _InterlockedExchangeAdd64(counter, 1)
typedef volatile __int64 counter;
#ifdef _M_X64
#define FETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
#else
#define FETCH(p) ((void)(p))
#endif
#else
#define FETCH(p) __builtin_prefetch(p, 0, 2)
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define next_unit(counter) __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)
typedef int64_t counter;
#endif

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { UNIFORM, LOOKUP, KNOTS }; /* how the segment of an element is found: see element.h */
enum {
    BLOCK = 512,       /* planes: elements per block, whose segments are kept in a buffer */
    COLUMNS = 4,       /* planes: copies of the sums, so that neighbours in one segment do not wait for each other */
    SHORT_PLANE = 16,  /* an inner size below this uses rows.h */
    TILE = 16,         /* rows: maximum number of rows at a time; no vector register holds more floats */
    PANEL = 64,        /* rows: positions per panel, so that their tables and sums stay in the L1 cache */
    FEW_KNOTS = 32,    /* planes: compare with all knots up to this number, and search among more */
    AHEAD = 1024,      /* rows: prefetch distance in elements */
    WIDTH = PANEL + TILE, /* maximum width of the last panel: a panel has at least TILE positions, unless the row is shorter */
};

/* `parallel` has the signature of GOMP_parallel, so that the threads of PyTorch can do the work. */
typedef void (*parallel_fn)(void (*worker)(void *), void *data, unsigned threads, unsigned flags);

enum { MEAN, GAIN, SHIFT, G_TERM, CENTRED_TERM, NORM_VECTORS }; /* z = (x - mean) gain + shift; the others: see norm_gradient */

typedef struct job {
    int dtype, form;
    int norm_input,
        grad_is_of_z; /* norm_input: y is the gradient of the input of the norm; grad_is_of_z: grad is the gradient of z */
    int64_t outer, channels, inner, intervals, segments;
    const void *x, *grad; /* inputs */
    void *y; /* the output, or the gradient of x, or NULL */
    const void *parameters[5]; /* left, right, heights, left_slope, right_slope; or the four tables of a look-up; with KNOTS,
                                  the first are the knots and there is no right */
    void *gradients[5]; /* of the parameters; for moments: the pool; for a norm: see pwlu_normalization */
    const void *residual; /* elements to add to the output of the norm, or NULL */
    const void *norm, *norm_sums; /* REAL (4, channels) and (3, channels), as in pwlu.reference, or NULL */
    void *norm_total; /* REAL (3, channels): the computed sums of the norm, or NULL */
    double factor, eps, count; /* of the running average; of the norm; elements per channel over all processes */
    void *left, *scale, *right; /* REAL (positions): B_L, N/(B_R - B_L), B_R; for moments, left is the shift */
    void *vectors[NORM_VECTORS]; /* REAL (positions): the vectors of a norm */
    void *knots; /* REAL (channels, segments), with KNOTS: the knots; the last entry is not used */
    int32_t *base; /* rows, (positions): where a position's channel begins in `table`, `split` and `sums` */
    void *table; /* REAL (channels, segments, 2): slope and offset */
    void *split; /* REAL (channels, 2, segments): slopes, then offsets; TILE longer */
    double *sums; /* (units, channels, segments, 2): of g and g x; for moments, of x - shift and its
                                       square. With a norm, the last segment holds the sums of g_z and g_z (x - mean) */
    double *columns; /* (units, COLUMNS, segments, 2): copies for one plane, or NULL */
    int64_t positions; /* planes: channels; rows: elements per row */
    int64_t chunk; /* elements per unit */
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
static inline int64_t channels_per_unit(const job *j) { return larger(1, 16384 / j->segments); } /* in prepare and finish */

/* Divide the work into units. The division depends only on shapes and the number of threads, so that results are reproducible.
 * Join short rows into one row of at least PANEL positions, or of BLOCK positions if there are no tables and no sums. */
static void plan(job *j, int summing) {
    const int64_t size = size_of(j), row = j->channels * j->inner;
    j->threads = (unsigned)smaller(j->threads, size / 32768 + 1); /* the grain size of PyTorch's loops */
    const int64_t units = j->threads == 1 ? 1 : summing ? j->threads : 4 * (int64_t)j->threads; /* each unit has its own sums */
    j->positions = in_rows(j) ? row * smaller(j->outer, ceil_div(j->grad_is_of_z ? BLOCK : PANEL, row)) : j->channels;
    const int64_t align = !in_rows(j) ? BLOCK : size / j->positions < TILE * units ? j->positions : TILE * j->positions;
    j->chunk = ceil_div(ceil_div(size, units), align) * align;
    j->units = ceil_div(size, j->chunk);
}

/* Prefetch elements [at, at + n) into the L2 cache: the L1 cache holds tables and sums. Call this often with a small n between
 * the computations, so that memory is always busy. */
static inline void fetch(const job *j, int64_t at, int64_t n) {
    const int64_t bytes = j->dtype == FLOAT64 ? 8 : j->dtype == FLOAT32 ? 4 : 2, stop = bytes * (at + n);
    const char *x = j->x, *grad = j->grad, *y = j->y ? j->y : x, *residual = j->residual;
    for (int64_t i = bytes * at; i < stop; i += 64) FETCH(x + i), FETCH(y + i);
    for (int64_t i = bytes * at; grad && i < stop; i += 64) FETCH(grad + i);
    for (int64_t i = bytes * at; residual && i < stop; i += 64) FETCH(residual + i);
}

/* Return the element from which to prefetch while a panel of `count` rows is processed. The panel starts at position p, and its
 * first element is `at`. Hardware prefetchers do not predict the order of panels. So prefetch the next rows in memory order,
 * AHEAD of time. */
static inline int64_t after_rows(const job *j, int64_t at, int count, int64_t p) {
    return at - p + count * (j->positions + p) + AHEAD;
}
