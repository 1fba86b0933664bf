/* Moments, for one REAL: sums of x - shift and of its square. The shift, a channel's first element, keeps the squares small. */

static void FOR_REAL(moments_of_planes)(const job *j, int64_t at, int64_t stop, double *sums) {
    enum { COPIES = 8 };
    REAL buffer[BLOCK];
    for (int64_t n; at < stop; at += n) {
        const int64_t c = at / j->inner % j->channels;
        n = smaller(smaller(BLOCK, stop - at), j->inner - at % j->inner);
        const REAL *x = FOR_REAL(read)(j, j->x, at, (int)n, buffer), shift = ((const REAL *)j->left)[c];
        double first[COPIES] = {0}, second[COPIES] = {0};
        int64_t i = 0;
        for (; i + COPIES <= n; i += COPIES)
            for (int k = 0; k < COPIES; k++) {
                const double v = (double)x[i + k] - shift;
                first[k] += v, second[k] += v * v;
            }
        for (int k = 0; i + k < n; k++) {
            const double v = (double)x[i + k] - shift;
            first[k] += v, second[k] += v * v;
        }
        for (int k = 0; k < COPIES; k++) sums[2 * c] += first[k], sums[2 * c + 1] += second[k];
    }
}

/* Process positions [p, p + n) of `count` rows. */
static void FOR_REAL(moments_of_panel)(const job *j, int64_t at, int count, int64_t p, int n, double *sums) {
    REAL buffer[WIDTH];
    double first[WIDTH] = {0}, second[WIDTH] = {0};
    const REAL *shift = (const REAL *)j->left + p;
    for (int r = 0; r < count; r++) {
        fetch(j, after_rows(j, at, count, p) + r * n, n);
        const REAL *x = FOR_REAL(read)(j, j->x, at + r * j->positions, n, buffer);
        for (int i = 0; i < n; i++) {
            const double v = (double)x[i] - shift[i];
            first[i] += v, second[i] += v * v;
        }
    }
    for (int i = 0; i < n; i++) sums[j->base[p + i]] += first[i], sums[j->base[p + i] + 1] += second[i];
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
