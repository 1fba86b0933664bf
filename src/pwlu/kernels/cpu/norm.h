/* Compute a batch norm before the PWLU, for one REAL: z = (x - mean) gain + shift (+ residual), and its backward pass. */

/* Return one of the vectors of the norm, from p on. p is a position in rows, and a channel in planes. */
INLINE const REAL *FOR_REAL(vector)(const job *j, int which, int64_t p) { return (const REAL *)j->vectors[which] + p; }

/* Return z of n elements from `at` on, as reference.normalize computes it. Return x if z is not needed. In rows (along = 1),
 * each element has its own entry of the norm. */
INLINE const REAL *FOR_REAL(normalized)(const job *j, int64_t at, int64_t p, const REAL *x, int n, int along,
                                        REAL *restrict z) {
    if (!j->norm || j->grad_is_of_z) return x;
    REAL buffer[BLOCK];
    const REAL *residual = FOR_REAL(read)(j, j->residual, at, n, buffer);
    const REAL *mean = FOR_REAL(vector)(j, MEAN, p), *gain = FOR_REAL(vector)(j, GAIN, p),
               *shift = FOR_REAL(vector)(j, SHIFT, p);
    if (residual)
        for (int i = 0; i < n; i++) z[i] = (x[i] - mean[along * i]) * gain[along * i] + shift[along * i] + residual[i];
    else
        for (int i = 0; i < n; i++) z[i] = (x[i] - mean[along * i]) * gain[along * i] + shift[along * i];
    return z;
}

/* Compute the gradient of x from the gradient of z, as reference.norm_input does. `out` may be `grad`. */
INLINE void FOR_REAL(norm_gradient)(const job *j, int64_t p, const REAL *grad, const REAL *x, int n, int along, REAL *out) {
    const REAL *mean = FOR_REAL(vector)(j, MEAN, p), *gain = FOR_REAL(vector)(j, GAIN, p);
    const REAL *g_term = FOR_REAL(vector)(j, G_TERM, p), *centred_term = FOR_REAL(vector)(j, CENTRED_TERM, p);
    if (j->norm_sums)
        for (int i = 0; i < n; i++)
            out[i] = gain[along * i] * (grad[i] - g_term[along * i] - (x[i] - mean[along * i]) * centred_term[along * i]);
    else
        for (int i = 0; i < n; i++) out[i] = gain[along * i] * grad[i];
}

/* Add g_z and g_z (x - mean) of positions [p, p + n) in `count` rows to the sums. */
static void FOR_REAL(norm_sums_of_panel)(const job *j, int64_t p, const REAL *grad, int64_t grad_row, const REAL *x,
                                         int64_t x_row, int count, int n, double *sums) {
    double totals[2 * WIDTH];
    SUMS_OF_ROWS(grad, grad_row, x, x_row, FOR_REAL(vector)(j, MEAN, p), count, n, totals);
    for (int i = 0; i < n; i++) {
        double *sum = sums + j->base[p + i] + 2 * (j->segments - 1);
        sum[0] += totals[i], sum[1] += totals[WIDTH + i];
    }
}

/* Compute the entries of channel c in the vectors of the norm. */
static void FOR_REAL(prepare_norm)(job *j, int64_t c) {
    const REAL *norm = (const REAL *)j->norm + c, *sums = (const REAL *)j->norm_sums;
    const REAL inv_std = norm[j->channels], count = (REAL)j->count;
    const REAL values[NORM_VECTORS] = {norm[0], norm[2 * j->channels], norm[3 * j->channels], sums ? sums[c] / count : 0,
                                       sums ? sums[j->channels + c] / count * inv_std * inv_std : 0};
    for (int k = 0; k < NORM_VECTORS; k++) ((REAL *)j->vectors[k])[c] = values[k];
}

/* Write the sums of the norm of channel c. `total` is their place, after the sums of the segments. */
static void FOR_REAL(finish_norm_sums)(job *j, int64_t c, const double *total) {
    REAL *sums = (REAL *)j->norm_total + c;
    const double inv_std = ((const REAL *)j->norm)[j->channels + c];
    sums[0] = (REAL)total[0], sums[j->channels] = (REAL)total[1], sums[2 * j->channels] = (REAL)(total[1] * inv_std);
}
