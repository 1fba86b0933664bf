/* Compute tables from parameters, and gradients from sums, per channel, for one REAL. */

/* Compute bounds, scale and table of channel c, as reference.scale_and_open and reference.tables do. */
static void FOR_REAL(prepare_channel)(job *j, int64_t c) {
    const int64_t n = j->intervals;
    const REAL *const *given = (const REAL *const *)j->parameters;
    REAL *restrict slopes = (REAL *)j->split + 2 * c * j->segments, *restrict offsets = slopes + j->segments;
    if (j->form == LOOKUP) {
        memcpy(slopes, given[2] + c * j->segments, sizeof(REAL) * (size_t)j->segments);
        memcpy(offsets, given[3] + c * j->segments, sizeof(REAL) * (size_t)j->segments);
        ((REAL *)j->left)[c] = given[0][c], ((REAL *)j->scale)[c] = given[1][c], ((REAL *)j->right)[c] = 0;
        return;
    }
    const REAL left = given[0][c], right = given[1][c], *restrict heights = given[2] + c * (n + 1);
    const REAL left_slope = given[3][c], right_slope = given[4][c], scale = (REAL)n / (right - left);
    const int open = scale > 0 && scale <= LARGEST; /* else the interval between the bounds is empty */
    ((REAL *)j->left)[c] = left, ((REAL *)j->scale)[c] = open ? scale : 1, ((REAL *)j->right)[c] = open ? right : left;
    const double step = open ? ((double)right - left) / (double)n : 1;
    slopes[0] = left_slope, offsets[0] = (REAL)(heights[0] - (double)left * left_slope);
    for (int i = 0; i < (int)n; i++) { /* int, because few CPUs can vectorize conversions from int64_t */
        const double slope = ((double)heights[i + 1] - heights[i]) / step;
        slopes[i + 1] = (REAL)slope, offsets[i + 1] = (REAL)(heights[i] - (left + i * step) * slope);
    }
    slopes[j->segments - 1] = offsets[j->segments - 1] = 0; /* with a norm, no element is in the last segment */
    slopes[n + 1] = right_slope, offsets[n + 1] = (REAL)(heights[n] - (double)right * right_slope);
}

static void FOR_REAL(prepare)(job *j, int64_t unit) {
    const int64_t first = unit * channels_per_unit(j), stop = smaller(j->channels, first + channels_per_unit(j));
    for (int64_t c = first; c < stop; c++) {
        if (j->norm) FOR_REAL(prepare_norm)(j, c);
        if (!j->intervals) { /* for moments, compute only the shift */
            REAL buffer, z;
            const REAL *x = FOR_REAL(read)(j, j->x, c * j->inner, 1, &buffer);
            ((REAL *)j->left)[c] = *FOR_REAL(normalized)(j, c * j->inner, c, x, 1, 0, &z);
            continue;
        }
        if (j->grad_is_of_z) continue;
        if (j->form == KNOTS) FOR_REAL(prepare_knots)(j, c);
        else FOR_REAL(prepare_channel)(j, c);
        REAL *restrict table = (REAL *)j->table + 2 * c * j->segments;
        const REAL *restrict split = (const REAL *)j->split + 2 * c * j->segments;
        for (int64_t s = 0; s < j->segments; s++) table[2 * s] = split[s], table[2 * s + 1] = split[j->segments + s];
    }
}

/* In rows, expand one entry per channel to one per position, in place. Go backwards, because an entry is read from its own
 * place or from one before it. */
static void FOR_REAL(spread)(job *j) {
    for (int64_t p = j->positions - 1; p >= 0; p--) {
        const int64_t c = p / j->inner % j->channels;
        ((REAL *)j->left)[p] = ((REAL *)j->left)[c];
        ((REAL *)j->scale)[p] = ((REAL *)j->scale)[c];
        ((REAL *)j->right)[p] = ((REAL *)j->right)[c];
        for (int k = 0; j->norm && k < NORM_VECTORS; k++) ((REAL *)j->vectors[k])[p] = ((REAL *)j->vectors[k])[c];
        j->base[p] = (int32_t)(2 * c * j->segments);
    }
}

/* Add the sums of channel c over all units, store the result in those of the first unit, and return them. */
static const double *FOR_REAL(total)(job *j, int64_t c) {
    double *total = j->sums + 2 * c * j->segments;
    for (int64_t unit = 1; unit < j->units; unit++)
        for (int64_t s = 0; s < 2 * j->segments; s++) total[s] += total[2 * unit * j->channels * j->segments + s];
    return total;
}

/* Compute the gradients of channel c from its sums, as reference.backward does. */
static void FOR_REAL(finish_gradients)(job *j, int64_t c) {
    const int64_t n = j->intervals, p = first_position(j, c);
    const double *total = FOR_REAL(total)(j, c) + 2;
    if (j->form == KNOTS) {
        FOR_REAL(finish_knots)(j, c, total);
        return;
    }
    if (j->norm) FOR_REAL(finish_norm_sums)(j, c, total + 2 * (n + 1));
    const REAL *const *given = (const REAL *const *)j->parameters;
    REAL *const *gradients = (REAL *const *)j->gradients;
    const double left = given[0][c], right = given[1][c], left_slope = given[3][c], right_slope = given[4][c];
    const REAL *heights = given[2] + c * (n + 1);
    const int open = ((const REAL *)j->right)[p] != ((const REAL *)j->left)[p];
    const double step = open ? (right - left) / (double)n : 1;
    double grad_left = 0, grad_right = 0, height = total[-2];
    for (int64_t i = 0; i < n; i++) {
        const double g = total[2 * i], share = (total[2 * i + 1] - (left + (double)i * step) * g) / step; /* sum g(x - B_i)/d */
        const double slope = ((double)heights[i + 1] - heights[i]) / step;
        grad_left += slope * (share + (double)(i - n) * g);
        grad_right -= slope * (share + (double)i * g);
        gradients[2][c * (n + 1) + i] = (REAL)(height + g - share);
        height = share;
    }
    gradients[2][c * (n + 1) + n] = (REAL)(height + total[2 * n]);
    gradients[0][c] = (REAL)(grad_left / (double)n - left_slope * total[-2]);
    gradients[1][c] = (REAL)(grad_right / (double)n - right_slope * total[2 * n]);
    gradients[3][c] = (REAL)(total[-1] - left * total[-2]), gradients[4][c] = (REAL)(total[2 * n + 1] - right * total[2 * n]);
}
