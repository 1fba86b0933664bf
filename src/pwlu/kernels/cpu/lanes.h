/* float32 with vector intrinsics. Tables of up to REGISTER_ENTRIES segments (REGISTER_PAIRS if offsets are needed too) are kept
 * in registers, and a look-up is a permutation. */
static inline int fits_registers(const job *j) { return j->segments <= (j->grad ? REGISTER_ENTRIES : REGISTER_PAIRS); }

typedef struct {
    lanes left, scale, right, slopes[PARTS], offsets[PARTS];
} function; /* of one channel */

INLINE function load_function(const job *j, int64_t p, int64_t base, int parts) {
    const float *table = (const float *)j->split + base;
    function f;
    f.left = V(set1_ps)(((const float *)j->left)[p]), f.scale = V(set1_ps)(((const float *)j->scale)[p]);
    f.right = V(set1_ps)(((const float *)j->right)[p]);
    for (int k = 0; k < PARTS; k++) {
        f.slopes[k] = k < parts ? V(loadu_ps)(table + LANES * k) : V(set1_ps)(0);
        f.offsets[k] = k < parts ? V(loadu_ps)(table + j->segments + LANES * k) : V(set1_ps)(0);
    }
    return f;
}

/* Return y, or with `backward` the slope at x, and store the places for the sums. */
INLINE lanes map_vector(const function *f, lanes x, int64_t base, int32_t *place, int intervals, int backward, int lookup, int parts) {
    const indices s = locate_lanes(x, f->left, f->scale, f->right, intervals, lookup);
    if (backward) store_places(place, V(add_epi32)(V(slli_epi32)(s, 1), V(set1_epi32)((int)base)));
    const lanes slope = look_up(f->slopes, s, parts);
    return backward ? slope : V(add_ps)(V(mul_ps)(finite_lanes(x), slope), look_up(f->offsets, s, parts));
}

/* Do `locate` and `apply` in one pass, for n elements of channel c. `place` has room for LANES more. */
INLINE void plane_of_vectors(const job *j, int64_t c, int64_t base, const float *x, const float *grad, int n, float *out, int32_t *place,
                      int backward, int lookup, int parts) {
    const function f = load_function(j, c, 2 * c * j->segments, parts);
    const int intervals = (int)j->intervals;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const lanes v = map_vector(&f, V(loadu_ps)(x + i), base, place + i, intervals, backward, lookup, parts);
        if (out) V(storeu_ps)(out + i, backward ? V(mul_ps)(V(loadu_ps)(grad + i), v) : v);
    }
    if (i == n) return;
    const lanes v = map_vector(&f, load_some(x + i, n - i), base, place + i, intervals, backward, lookup, parts);
    if (out) store_some(out + i, backward ? V(mul_ps)(load_some(grad + i, n - i), v) : v, n - i);
}

/* `locate` in rows. `place` has room for LANES more. */
INLINE void row_of_vectors(const job *j, int64_t p, const float *x, int n, int32_t *place, int lookup) {
    const float *left = (const float *)j->left + p, *scale = (const float *)j->scale + p, *right = (const float *)j->right + p;
    const float *base = (const float *)(j->base + p);
    const int intervals = (int)j->intervals;
#define LOCATE(load)                                                                                            \
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
    if (j->lookup) row_of_vectors(j, p, x, n, place, 1);
    else row_of_vectors(j, p, x, n, place, 0);
}

INLINE void transpose(lanes *v) { /* 4 x 4 blocks, in each 128-bit part of the registers */
    const lanes a = V(unpacklo_ps)(v[0], v[2]), b = V(unpackhi_ps)(v[0], v[2]);
    const lanes c = V(unpacklo_ps)(v[1], v[3]), d = V(unpackhi_ps)(v[1], v[3]);
    v[0] = V(unpacklo_ps)(a, c), v[1] = V(unpackhi_ps)(a, c);
    v[2] = V(unpacklo_ps)(b, d), v[3] = V(unpackhi_ps)(b, d);
}

/* Tiles of LANES positions in LANES rows, `row` apart, from position p on. Four floats of several rows are loaded into a register
 * at once; transposed, it holds elements of one position. Places are stored position by position. */
INLINE void panel_of_tiles(const job *j, int64_t p, const float *x, const float *grad, float *out, int64_t row, int n, int32_t *place,
                           int64_t next, int backward, int lookup, int parts) {
    const int intervals = (int)j->intervals;
    for (int q = 0; q < n; q += LANES) {
        const int first = q < n - LANES ? q : n - LANES; /* the last tile may overlap another */
        lanes v[LANES];
        for (int k = 0; k < LANES; k += 4) {
            fetch(j, next + (q + k) * LANES, 4 * LANES);
            for (int r = 0; r < 4; r++) v[k + r] = load_quads(x + first + k + r * row, row);
            transpose(v + k);
            for (int c = k; c < k + 4; c++) {
                const int32_t base = j->base[p + first + c];
                const function f = load_function(j, p + first + c, base, parts);
                v[c] = map_vector(&f, v[c], base, place + (first + c) * LANES, intervals, backward, lookup, parts);
            }
            transpose(v + k);
        }
        if (!out) continue;
        exchange_quads(v);
        for (int r = 0; r < LANES; r++) {
            const int64_t at = first + r * row;
            V(storeu_ps)(out + at, backward ? V(mul_ps)(V(loadu_ps)(grad + at), v[r]) : v[r]);
        }
    }
}

/* Call a function with constants for the form of the job and the parts of its table. */
#define FORM(parts, call, ...)                              \
    case parts:                                             \
        if (j->grad) call(__VA_ARGS__, 1, 0, parts);        \
        else if (j->lookup) call(__VA_ARGS__, 0, 1, parts); \
        else call(__VA_ARGS__, 0, 0, parts);                \
        break;
#define IN_ITS_FORM(...)                                                                                       \
    switch (ceil_div(j->segments, LANES)) {                                                                    \
        FORM(1, __VA_ARGS__) FORM(2, __VA_ARGS__) FORM(3, __VA_ARGS__) FORM(4, __VA_ARGS__) FORM(5, __VA_ARGS__) \
    }

static void map_plane(const job *j, int64_t c, int64_t base, const float *x, const float *grad, int n, float *out, int32_t *place) {
    IN_ITS_FORM(plane_of_vectors, j, c, base, x, grad, n, out, place)
}

static void map_panel(const job *j, int64_t p, const float *x, const float *grad, float *out, int64_t row, int n, int32_t *place,
                      int64_t next) {
    IN_ITS_FORM(panel_of_tiles, j, p, x, grad, out, row, n, place, next)
}
