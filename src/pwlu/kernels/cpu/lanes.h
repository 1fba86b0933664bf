/* Process float32 with vector intrinsics. Tables of up to REGISTER_ENTRIES segments stay in registers (REGISTER_PAIRS if
 * offsets are needed too), and a look-up is a permutation. */
static inline int fits_registers(const job *j) { return j->segments <= (j->grad ? REGISTER_ENTRIES : REGISTER_PAIRS); }

typedef struct {
    lanes left, scale, right, slopes[PARTS], offsets[PARTS];
    const float *knots; /* with KNOTS */
} function; /* of one channel */

INLINE function load_function(const job *j, int64_t p, int64_t base, int parts) {
    const float *table = (const float *)j->split + base;
    function f;
    f.knots = j->form == KNOTS ? (const float *)j->knots + base / 2 : NULL;
    f.left = V(set1_ps)(((const float *)j->left)[p]), f.scale = V(set1_ps)(((const float *)j->scale)[p]);
    f.right = V(set1_ps)(((const float *)j->right)[p]);
    for (int k = 0; k < PARTS; k++) {
        f.slopes[k] = k < parts ? V(loadu_ps)(table + LANES * k) : V(set1_ps)(0);
        f.offsets[k] = k < parts ? V(loadu_ps)(table + j->segments + LANES * k) : V(set1_ps)(0);
    }
    return f;
}

/* Return y. With `backward`, return the slope at x instead, and store the places for the sums. */
INLINE lanes map_vector(const function *f, lanes x, int64_t base, int32_t *place, int intervals, int backward, int form,
                        int parts) {
    indices s = V(set1_epi32)(0);
    if (form == KNOTS)
        for (int k = 0; k <= intervals; k++) s = count_lanes(s, x, V(set1_ps)(f->knots[k]));
    else s = locate_lanes(x, f->left, f->scale, f->right, intervals, form == LOOKUP);
    if (backward) store_places(place, V(add_epi32)(V(slli_epi32)(s, 1), V(set1_epi32)((int)base)));
    const lanes slope = look_up(f->slopes, s, parts);
    return backward ? slope : V(add_ps)(V(mul_ps)(finite_lanes(x), slope), look_up(f->offsets, s, parts));
}

/* Do `locate` and `apply` in one pass, for n elements of channel c. `place` has room for LANES more. */
INLINE void plane_of_vectors(const job *j, int64_t c, int64_t base, const float *x, const float *grad, int n, float *out,
                             int32_t *place, int backward, int form, int parts) {
    const function f = load_function(j, c, 2 * c * j->segments, parts);
    const int intervals = (int)j->intervals;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const lanes v = map_vector(&f, V(loadu_ps)(x + i), base, place + i, intervals, backward, form, parts);
        if (out) V(storeu_ps)(out + i, backward ? V(mul_ps)(V(loadu_ps)(grad + i), v) : v);
    }
    if (i == n) return;
    const lanes v = map_vector(&f, load_some(x + i, n - i), base, place + i, intervals, backward, form, parts);
    if (out) store_some(out + i, backward ? V(mul_ps)(load_some(grad + i, n - i), v) : v, n - i);
}

/* Add the terms of `sums_of` for one register of x (and of g if given), as two registers of doubles. */
#define ADD_HALF(half, k, v, w, shift) \
    { \
        const doubles centred = V(sub_pd)(half(v), half(shift)); \
        const doubles value = g ? half(w) : centred; \
        first[k] = V(add_pd)(first[k], value); \
        second[k] = V(add_pd)(second[k], V(mul_pd)(value, centred)); \
    }
#define ADD_VECTOR(k, at, shift) \
    { \
        const lanes v = V(loadu_ps)(x + (at)), w = g ? V(loadu_ps)(g + (at)) : v; \
        ADD_HALF(first_half, k, v, w, shift) ADD_HALF(second_half, (k) + 1, v, w, shift) \
    }

/* Compute `sums_of`, in four pairs of registers, so that additions do not wait for each other. */
INLINE void sums_of_vectors(const float *g, const float *x, float shift, int n, double *sums) {
    enum { HALF = LANES / 2 };
    const lanes shifts = V(set1_ps)(shift);
    doubles first[4], second[4];
    double parts[2][HALF];
    for (int k = 0; k < 4; k++) first[k] = second[k] = V(setzero_pd)();
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        ADD_VECTOR(0, i, shifts)
        ADD_VECTOR(2, i + LANES, shifts)
    }
    for (; i + LANES <= n; i += LANES) ADD_VECTOR(0, i, shifts)
    V(storeu_pd)(parts[0], V(add_pd)(V(add_pd)(first[0], first[1]), V(add_pd)(first[2], first[3])));
    V(storeu_pd)(parts[1], V(add_pd)(V(add_pd)(second[0], second[1]), V(add_pd)(second[2], second[3])));
    for (; i < n; i++) {
        const double centred = (double)x[i] - shift, value = g ? g[i] : centred;
        parts[0][i % HALF] += value, parts[1][i % HALF] += value * centred;
    }
    for (int k = 0; k < HALF; k++) sums[0] += parts[0][k], sums[1] += parts[1][k];
}

/* Compute `sums_of_rows`, one register of positions at a time. */
INLINE void sums_of_rows_of_vectors(const float *g, int64_t g_row, const float *x, int64_t x_row, const float *shift, int count,
                                    int n, double *totals) {
    int q = 0;
    for (; q + LANES <= n; q += LANES) {
        doubles first[2] = {V(setzero_pd)(), V(setzero_pd)()}, second[2] = {V(setzero_pd)(), V(setzero_pd)()};
        const lanes shifts = V(loadu_ps)(shift + q);
        const float *const g_first = g, *const x_first = x;
        for (int r = 0; r < count; r++, x += x_row, g = g ? g + g_row : NULL) ADD_VECTOR(0, q, shifts)
        g = g_first, x = x_first;
        for (int k = 0; k < 2; k++) {
            V(storeu_pd)(totals + q + k * LANES / 2, first[k]);
            V(storeu_pd)(totals + WIDTH + q + k * LANES / 2, second[k]);
        }
    }
    for (; q < n; q++) {
        totals[q] = totals[WIDTH + q] = 0;
        for (int r = 0; r < count; r++) {
            const double centred = (double)x[r * x_row + q] - shift[q], value = g ? g[r * g_row + q] : centred;
            totals[q] += value, totals[WIDTH + q] += value * centred;
        }
    }
}
#undef ADD_VECTOR
#undef ADD_HALF

/* Do `locate` in rows. `place` has room for LANES more. */
INLINE void row_of_vectors(const job *j, int64_t p, const float *x, int n, int32_t *place, int lookup) {
    const float *left = (const float *)j->left + p, *scale = (const float *)j->scale + p, *right = (const float *)j->right + p;
    const float *base = (const float *)(j->base + p);
    const int intervals = (int)j->intervals;
#define LOCATE(load) \
    const indices s = locate_lanes(load(x + i), load(left + i), load(scale + i), load(right + i), intervals, lookup); \
    store_places(place + i, V(add_epi32)(V(slli_epi32)(s, 1), as_indices(load(base + i))));
#define load_rest(p) load_some(p, n - i)
    int i = 0;
    for (; i + LANES <= n; i += LANES) { LOCATE(V(loadu_ps)) }
    if (i < n) { LOCATE(load_rest) }
#undef LOCATE
#undef load_rest
}

static void locate_row(const job *j, int64_t p, const float *x, int n, int32_t *place) {
    if (j->form == KNOTS) locate_knots_in_row_float(j, p, x, n, place);
    else if (j->form == LOOKUP) row_of_vectors(j, p, x, n, place, 1);
    else row_of_vectors(j, p, x, n, place, 0);
}

INLINE void transpose(lanes *v) { /* 4 x 4 blocks, in each 128-bit part of the registers */
    const lanes a = V(unpacklo_ps)(v[0], v[2]), b = V(unpackhi_ps)(v[0], v[2]);
    const lanes c = V(unpacklo_ps)(v[1], v[3]), d = V(unpackhi_ps)(v[1], v[3]);
    v[0] = V(unpacklo_ps)(a, c), v[1] = V(unpackhi_ps)(a, c);
    v[2] = V(unpacklo_ps)(b, d), v[3] = V(unpackhi_ps)(b, d);
}

/* Process LANES rows from position p on, in tiles of LANES positions. x_row, grad_row and out_row are the distances between
 * rows. A register is loaded with four floats from each of several rows. After transposing, it holds elements of one position.
 * The places of one position are stored together. */
INLINE void panel_of_tiles(const job *j, int64_t p, const float *x, int64_t x_row, const float *grad, int64_t grad_row,
                           float *out, int64_t out_row, int n, int32_t *place, int64_t next, int backward, int form,
                           int parts) {
    const int intervals = (int)j->intervals;
    for (int q = 0; q < n; q += LANES) {
        const int first = q < n - LANES ? q : n - LANES; /* the last tile may overlap another */
        lanes v[LANES];
        for (int k = 0; k < LANES; k += 4) {
            fetch(j, next + (q + k) * LANES, 4 * LANES);
            for (int r = 0; r < 4; r++) v[k + r] = load_quads(x + first + k + r * x_row, x_row);
            transpose(v + k);
            for (int c = k; c < k + 4; c++) {
                const int32_t base = j->base[p + first + c];
                const function f = load_function(j, p + first + c, base, parts);
                v[c] = map_vector(&f, v[c], base, place + (first + c) * LANES, intervals, backward, form, parts);
            }
            transpose(v + k);
        }
        if (!out) continue;
        exchange_quads(v);
        for (int r = 0; r < LANES; r++)
            V(storeu_ps)(out + first + r * out_row,
                         backward ? V(mul_ps)(V(loadu_ps)(grad + first + r * grad_row), v[r]) : v[r]);
    }
}

/* Call a function with constants for the kind of job and the number of registers of its table, so that it is specialized. */
#define FORM(parts, call, ...) \
    case parts: \
        if (j->form == KNOTS && j->grad) call(__VA_ARGS__, 1, KNOTS, parts); \
        else if (j->form == KNOTS) call(__VA_ARGS__, 0, KNOTS, parts); \
        else if (j->grad) call(__VA_ARGS__, 1, UNIFORM, parts); \
        else if (j->form == LOOKUP) call(__VA_ARGS__, 0, LOOKUP, parts); \
        else call(__VA_ARGS__, 0, UNIFORM, parts); \
        break;
#define IN_ITS_FORM(...) \
    switch (ceil_div(j->segments, LANES)) { \
        FORM(1, __VA_ARGS__) FORM(2, __VA_ARGS__) FORM(3, __VA_ARGS__) FORM(4, __VA_ARGS__) FORM(5, __VA_ARGS__) \
    }

static void map_plane(const job *j, int64_t c, int64_t base, const float *x, const float *grad, int n, float *out,
                      int32_t *place) {
    IN_ITS_FORM(plane_of_vectors, j, c, base, x, grad, n, out, place)
}

static void map_panel(const job *j, int64_t p, const float *x, int64_t x_row, const float *grad, int64_t grad_row, float *out,
                      int64_t out_row, int n, int32_t *place, int64_t next) {
    IN_ITS_FORM(panel_of_tiles, j, p, x, x_row, grad, grad_row, out, out_row, n, place, next)
}
