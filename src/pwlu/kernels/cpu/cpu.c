/* The CPU kernels of PWLU in C11, without headers of PyTorch or Python, called through ctypes. Only this file is compiled.
 *
 * A tensor is (outer, channels, inner) in memory order: NCHW has inner = H*W, channels_last and (batch, features) have
 * inner = 1. The kernels read memory in order:
 *
 *   planes.h   inner is long: blocks of neighbours in one channel
 *   rows.h     inner is short: neighbours are in different channels, and bounds are read from arrays along the row
 *
 * Segments follow pwlu.reference operation by operation: build with -ffp-contract=off. Sums are in double, in an order
 * that depends only on shapes and the number of threads, so that results are bitwise reproducible.
 */
#ifdef _MSC_VER
#pragma fp_contract(off) /* before 2022, /fp:precise allowed contraction */
#endif

#include <float.h>
#include <math.h>
#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#define PAIRS 1 /* 128-bit registers hold the two sums of a segment, or two entries of the table */
#endif

#include "job.h"
#include "convert.h"

#define REAL float
#define LARGEST FLT_MAX
#ifdef __AVX2__
#define VECTORS 1 /* intrinsics of lanes.h, for float only */
#endif
#include "real.h"
#undef REAL
#undef LARGEST
#undef VECTORS
#define REAL double
#define LARGEST DBL_MAX
#include "real.h"

#ifndef PWLU_SOURCE_ID
#define PWLU_SOURCE_ID 0
#endif
EXPORT uint32_t pwlu_source_id(void) { return PWLU_SOURCE_ID; }

static int start(job *j, int summing) {
    /* table indices have 32 bits, and a float must hold the number of intervals exactly */
    if (size_of(j) < 1 || j->segments < 1 || j->segments > 1 << 24 || j->segments > INT32_MAX / 2 / j->channels) return 2;
    plan(j, summing);
    const size_t real = j->dtype == FLOAT64 ? sizeof(double) : sizeof(float), positions = (size_t)j->positions;
    const size_t entries = 2 * (size_t)(j->channels * j->segments), sums = summing ? (size_t)j->units * entries : 0;
    /* for short planes, clearing and adding the copies takes longer than they save */
    const int copies = summing && j->intervals && !in_rows(j) && j->inner >= 8 * j->segments;
    const size_t vectors = j->norm ? NORM_VECTORS : 0;
    const size_t knots = j->form == KNOTS ? entries / 2 : 0;
    const size_t columns = copies ? (size_t)(j->units * COLUMNS * 2 * j->segments) : 0;
    char *scratch = malloc(sizeof(double) * (sums + columns) + real * (2 * entries + TILE + knots + (3 + vectors) * positions) +
                           sizeof(int32_t) * positions);
    if (!scratch) return 1;
    j->sums = summing ? (double *)scratch : NULL, j->columns = copies ? (double *)scratch + sums : NULL;
    j->table = (double *)scratch + sums + columns, j->split = (char *)j->table + real * entries;
    j->left = (char *)j->split + real * (entries + TILE), j->scale = (char *)j->left + real * positions;
    j->right = (char *)j->scale + real * positions;
    for (size_t k = 0; k < vectors; k++) j->vectors[k] = (char *)j->right + real * (k + 1) * positions;
    j->knots = (char *)j->right + real * (vectors + 1) * positions;
    j->base = (int32_t *)((char *)j->knots + real * knots);
    memset((char *)j->split + real * entries, 0, real * TILE); /* vectors load these entries but never select them */
    if (j->dtype == FLOAT64) execute_double(j);
    else execute_float(j);
    free(scratch);
    return 0;
}

#define START parallel_fn parallel, unsigned threads, int dtype
#define GEOMETRY int64_t outer, int64_t channels, int64_t inner
#define JOB(...) \
    {.dtype = dtype, \
     .outer = outer, \
     .channels = channels, \
     .inner = inner, \
     .threads = threads, \
     .parallel = parallel, \
     __VA_ARGS__}

/* Each function returns 0 on success, 1 if it cannot allocate scratch memory, and 2 if a tensor is empty or the table is too
 * large. */
EXPORT int pwlu_forward(START, const void *x, void *y, GEOMETRY, int64_t intervals, const void *left, const void *right,
                        const void *heights, const void *left_slope, const void *right_slope) {
    job j = JOB(.x = x, .y = y, .intervals = intervals, .segments = intervals + 2,
                .parameters = {left, right, heights, left_slope, right_slope});
    return start(&j, 0);
}

EXPORT int pwlu_lookup(START, const void *x, void *y, GEOMETRY, int64_t intervals, const void *left, const void *inv_step,
                       const void *slopes, const void *offsets) {
    job j = JOB(.x = x, .y = y, .intervals = intervals, .segments = intervals + 2, .form = LOOKUP,
                .parameters = {left, inv_step, slopes, offsets});
    return start(&j, 0);
}

/* If grad_x is NULL, do not compute the gradient of x. If all gradients of the parameters are NULL, do not compute them. */
EXPORT int pwlu_backward(START, const void *grad, const void *x, void *grad_x, GEOMETRY, int64_t intervals, const void *left,
                         const void *right, const void *heights, const void *left_slope, const void *right_slope,
                         void *grad_left, void *grad_right, void *grad_heights, void *grad_left_slope, void *grad_right_slope) {
    job j = JOB(.x = x, .grad = grad, .y = grad_x, .intervals = intervals, .segments = intervals + 2,
                .parameters = {left, right, heights, left_slope, right_slope},
                .gradients = {grad_left, grad_right, grad_heights, grad_left_slope, grad_right_slope});
    return start(&j, grad_left != NULL);
}

/* Non-uniform PWLUs. `weight` is a knot weight: see nonuniform_reference.pack_knots. */
#define BLOCK_OF(weight, k) ((weight) ? (char *)(weight) + (k) * channels * (dtype == FLOAT64 ? 8 : 4) : NULL)
#define KNOT_BLOCKS(weight) \
    {BLOCK_OF(weight, 0), NULL, BLOCK_OF(weight, intervals + 3), BLOCK_OF(weight, intervals + 1), \
     BLOCK_OF(weight, intervals + 2)}

EXPORT int pwlu_nonuniform_forward(START, const void *x, void *y, GEOMETRY, int64_t intervals, const void *weight) {
    job j = JOB(.x = x, .y = y, .form = KNOTS, .intervals = intervals, .segments = intervals + 2,
                .parameters = KNOT_BLOCKS(weight));
    return start(&j, 0);
}

/* grad_x may be NULL, and so may grad_weight. */
EXPORT int pwlu_nonuniform_backward(START, const void *grad, const void *x, void *grad_x, GEOMETRY, int64_t intervals,
                                    const void *weight, void *grad_weight) {
    job j = JOB(.x = x, .grad = grad, .y = grad_x, .form = KNOTS, .intervals = intervals, .segments = intervals + 2,
                .parameters = KNOT_BLOCKS(weight), .gradients = KNOT_BLOCKS(grad_weight));
    return start(&j, grad_weight != NULL);
}

/* Add count, mean and M2 of x to the pool, REAL (3, channels). */
EXPORT int pwlu_moments(START, const void *x, GEOMETRY, void *pool) {
    job j = JOB(.x = x, .segments = 1, .gradients = {pool});
    return start(&j, 1);
}

/* A batch norm followed by a PWLU: see reference.norm_forward and the functions after it. A norm is REAL (4, channels).
 * `weight` is the packed weight of a PWLU. */
#define BLOCKS(weight) {BLOCK_OF(weight, 0), BLOCK_OF(weight, 1), BLOCK_OF(weight, 4), BLOCK_OF(weight, 2), BLOCK_OF(weight, 3)}

/* With x, compute the norm of the batch, and update the running statistics, the number of batches and the pool. Each of these
 * may be NULL, and so may gamma and beta. Without x, compute the norm from the running statistics. */
EXPORT int pwlu_normalization(START, const void *x, GEOMETRY, const void *gamma, const void *beta, void *running_mean,
                              void *running_variance, void *batches, double factor, double eps, void *pool, void *norm) {
    job j = JOB(.x = x, .segments = 1, .parameters = {gamma, beta}, .factor = factor, .eps = eps,
                .gradients = {pool, running_mean, running_variance, batches, norm});
    if (x) return start(&j, 1);
    for (int64_t c = 0; c < channels; c++) {
        if (dtype == FLOAT64) write_norm_double(&j, c, ((double *)running_mean)[c], ((double *)running_variance)[c]);
        else write_norm_float(&j, c, ((float *)running_mean)[c], ((float *)running_variance)[c]);
    }
    return 0;
}

/* If there is a pool, add the moments of z to it, in a separate pass as in pwlu_moments. */
EXPORT int pwlu_norm_forward(START, const void *x, const void *residual, void *y, GEOMETRY, const void *norm, int64_t intervals,
                             const void *weight, void *pool) {
    job j = JOB(.x = x, .y = y, .residual = residual, .norm = norm, .intervals = intervals, .segments = intervals + 2,
                .parameters = BLOCKS(weight));
    job observed = JOB(.x = x, .residual = residual, .norm = norm, .segments = 1, .gradients = {pool});
    const int failed = start(&j, 0);
    return failed || !pool ? failed : start(&observed, 1);
}

/* Compute the gradient of z, the sums of the norm and the gradient of the weight. grad_z may be NULL. */
EXPORT int pwlu_norm_backward(START, const void *grad, const void *x, const void *residual, void *grad_z, GEOMETRY,
                              const void *norm, void *sums, int64_t intervals, const void *weight, void *grad_weight) {
    job j =
        JOB(.x = x, .grad = grad, .y = grad_z, .residual = residual, .norm = norm, .norm_total = sums, .intervals = intervals,
            .segments = intervals + 3, .parameters = BLOCKS(weight), .gradients = BLOCKS(grad_weight));
    return start(&j, 1);
}

/* Compute the gradient of x. If sums is NULL, mean and variance are constants. With grad_is_of_z, grad is the gradient of z, and the
 * weight is not read. */
EXPORT int pwlu_norm_input(START, const void *grad, const void *x, void *grad_x, GEOMETRY, const void *norm, const void *sums,
                           double count, int grad_is_of_z, int64_t intervals, const void *weight) {
    job j = JOB(.x = x, .grad = grad, .y = grad_x, .norm = norm, .norm_sums = sums, .count = count, .norm_input = 1,
                .grad_is_of_z = grad_is_of_z, .intervals = intervals, .segments = intervals + 2, .parameters = BLOCKS(weight));
    return start(&j, 0);
}
