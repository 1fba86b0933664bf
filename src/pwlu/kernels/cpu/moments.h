/* Compute the moments of x (with a norm, of z), for one REAL: sums of x - shift and of its square. The shift is the first
 * element of the channel. It keeps the squares small. */

static void FOR_REAL(moments_of_planes)(const job *j, int64_t at, int64_t stop, double *sums) {
    REAL buffer[BLOCK], z[BLOCK];
    for (int64_t n; at < stop; at += n) {
        const int64_t c = at / j->inner % j->channels;
        n = smaller(smaller(BLOCK, stop - at), j->inner - at % j->inner);
        const REAL *given = FOR_REAL(read)(j, j->x, at, (int)n, buffer), shift = ((const REAL *)j->left)[c];
        const REAL *x = FOR_REAL(normalized)(j, at, c, given, (int)n, 0, z);
        SUMS_OF(NULL, x, shift, (int)n, sums + 2 * c);
    }
}

/* Process positions [p, p + n) of `count` rows. */
static void FOR_REAL(moments_of_panel)(const job *j, int64_t at, int count, int64_t p, int n, double *sums) {
    REAL x_buffer[TILE * WIDTH], z_buffer[TILE * WIDTH];
    double totals[2 * WIDTH];
    const REAL *given = FOR_REAL(read_rows)(j, j->x, at, count, n, x_buffer), *x = given;
    const int64_t row = given == x_buffer ? WIDTH : j->positions;
    for (int r = count - 1; r >= 0; r--) {
        fetch(j, after_rows(j, at, count, p) + r * n, n);
        x = FOR_REAL(normalized)(j, at + r * j->positions, p, given + r * row, n, 1, z_buffer + r * WIDTH);
    }
    SUMS_OF_ROWS(NULL, 0, x, j->norm ? WIDTH : row, (const REAL *)j->left + p, count, n, totals);
    for (int i = 0; i < n; i++) sums[j->base[p + i]] += totals[i], sums[j->base[p + i] + 1] += totals[WIDTH + i];
}

/* Add the moments of channel c to the pool, as reference.merge does, with the same rounding of each operation. */
static void FOR_REAL(add_to_pool)(job *j, int64_t c, REAL mean, REAL m2) {
    REAL *pool = (REAL *)j->gradients[0] + c, *pool_mean = pool + j->channels, *pool_m2 = pool_mean + j->channels;
    const REAL n_1 = *pool, n_2 = (REAL)(j->outer * j->inner), n = n_1 + n_2, share = n_2 / (n < 1 ? 1 : n);
    const REAL distance = mean - *pool_mean;
    *pool = n, *pool_mean += distance * share;
    *pool_m2 = *pool_m2 + m2 + distance * n_1 * (distance * share);
}
