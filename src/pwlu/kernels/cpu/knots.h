/* Compute tables from parameters, and gradients from sums, per channel, with KNOTS, for one REAL. */

/* Return the width of interval i, or 1 if it is empty, as nonuniform_reference.widths_of does. */
INLINE double FOR_REAL(width_of)(const REAL *knots, int64_t i) {
    return knots[i + 1] > knots[i] ? (double)knots[i + 1] - knots[i] : 1;
}

/* Copy the knots of channel c, and compute its table. */
static void FOR_REAL(prepare_knots)(job *j, int64_t c) {
    const int64_t n = j->intervals;
    const REAL *const *given = (const REAL *const *)j->parameters;
    const REAL *knots = given[0] + c * (n + 1), *heights = given[2] + c * (n + 1);
    REAL *slopes = (REAL *)j->split + 2 * c * j->segments, *offsets = slopes + j->segments;
    REAL *copy = (REAL *)j->knots + c * j->segments;
    for (int64_t i = 0; i <= n; i++) copy[i] = knots[i] > LARGEST ? (REAL)NAN : knots[i]; /* no input is that large */
    ((REAL *)j->left)[c] = ((REAL *)j->scale)[c] = ((REAL *)j->right)[c] = 0;
    slopes[0] = given[3][c], offsets[0] = (REAL)(heights[0] - (double)knots[0] * slopes[0]);
    for (int64_t i = 0; i < n; i++) {
        const double slope = ((double)heights[i + 1] - heights[i]) / FOR_REAL(width_of)(knots, i);
        slopes[i + 1] = (REAL)slope, offsets[i + 1] = (REAL)(heights[i] - knots[i] * slope);
    }
    slopes[n + 1] = given[4][c], offsets[n + 1] = (REAL)(heights[n] - (double)knots[n] * slopes[n + 1]);
}

/* Compute the gradients of channel c from its sums, as nonuniform_reference.backward does. */
static void FOR_REAL(finish_knots)(const job *j, int64_t c, const double *total) {
    const int64_t n = j->intervals;
    const REAL *const *given = (const REAL *const *)j->parameters;
    const REAL *knots = given[0] + c * (n + 1), *heights = given[2] + c * (n + 1);
    REAL *const *gradients = (REAL *const *)j->gradients;
    REAL *grad_knots = gradients[0] + c * (n + 1), *grad_heights = gradients[2] + c * (n + 1);
    double height = total[-2], knot = -given[3][c] * total[-2]; /* what the segment on the left adds to the next knot */
    for (int64_t i = 0; i < n; i++) {
        const double width = FOR_REAL(width_of)(knots, i), slope = ((double)heights[i + 1] - heights[i]) / width;
        const double g = total[2 * i], share = (total[2 * i + 1] - knots[i] * g) / width;
        grad_heights[i] = (REAL)(height + g - share), grad_knots[i] = (REAL)(knot - slope * (g - share));
        height = share, knot = -slope * share;
    }
    grad_heights[n] = (REAL)(height + total[2 * n]), grad_knots[n] = (REAL)(knot - given[4][c] * total[2 * n]);
    gradients[3][c] = (REAL)(total[-1] - knots[0] * total[-2]);
    gradients[4][c] = (REAL)(total[2 * n + 1] - knots[n] * total[2 * n]);
}
