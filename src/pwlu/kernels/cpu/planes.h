/* Process planes, for one REAL: `inner` is long, so neighbours belong to the same channel. */

/* Process elements [at, at + n). They may span several short planes: each part of the block belongs to one channel. First
 * locate all segments (and compute the outputs, if the tables fit into vector registers). Then do the look-ups and sums.
 * In one loop, each look-up would wait for the segment that was just stored. */
static void FOR_REAL(block)(const job *j, int64_t at, int n, double *sums, int64_t column) {
    _Alignas(64) REAL x_buffer[BLOCK], grad_buffer[BLOCK], out_buffer[BLOCK], z_buffer[BLOCK];
    _Alignas(64) int32_t place[BLOCK + TILE];
    const REAL *given = FOR_REAL(read)(j, j->x, at, n, x_buffer), *grad = FOR_REAL(read)(j, j->grad, at, n, grad_buffer);
    const REAL *x = j->norm ? z_buffer : given;
    REAL *out = j->y && j->dtype <= FLOAT64 ? (REAL *)j->y + at : j->y || j->norm ? out_buffer : NULL;
    const int64_t first = at / j->inner % j->channels, first_rest = j->inner - at % j->inner;
    const REAL *table = (const REAL *)j->table + (column ? 2 * first * j->segments : 0);
#define FOR_PARTS(doing) \
    int64_t c = first, rest = first_rest; \
    for (int i = 0, m; i < n && (doing); i += m, rest = j->inner, c = c + 1 < j->channels ? c + 1 : 0)
    FOR_PARTS(!j->grad_is_of_z) {
        const int32_t base = column ? 0 : (int32_t)(2 * c * j->segments);
        m = (int)smaller(n - i, rest);
        FOR_REAL(normalized)(j, at + i, c, given + i, m, 0, z_buffer + i);
        if (IN_REGISTERS(j)) MAP_PLANE(j, c, base, x + i, grad ? grad + i : NULL, m, out ? out + i : NULL, place + i);
        else FOR_REAL(locate_plane)(j, c, base, x + i, m, place + i);
    }
    if (out && !IN_REGISTERS(j) && !j->grad_is_of_z) FOR_REAL(apply)(table, x, grad, place, n, out);
    if (sums) FOR_REAL(accumulate)(grad, x, place, 1, n, sums, column);
    if (j->norm) {
        FOR_PARTS(sums || j->norm_input) {
            m = (int)smaller(n - i, rest);
            if (sums)
                SUMS_OF(out + i, given + i, *FOR_REAL(vector)(j, MEAN, c), m,
                        sums + 2 * ((column ? 1 : c + 1) * j->segments - 1));
            else FOR_REAL(norm_gradient)(j, c, (j->grad_is_of_z ? grad : out) + i, given + i, m, 0, out + i);
        }
    }
#undef FOR_PARTS
    if (j->y && out == out_buffer) narrow(j->dtype, (const float *)out, (uint16_t *)j->y + at, n);
}

/* Process elements [at, stop). A long plane is summed in COLUMNS copies, which are then added to the sums of its channel. */
static void FOR_REAL(map_planes)(const job *j, int64_t at, int64_t stop, double *sums, double *columns) {
    const int64_t column = 2 * j->segments;
    for (int64_t end; at < stop; at = end) {
        end = columns ? smaller(stop, (at / j->inner + 1) * j->inner) : stop;
        double *total = sums ? sums + at / j->inner % j->channels * column : NULL;
        if (columns) memset(columns, 0, sizeof(double) * COLUMNS * (size_t)column);
        for (int64_t i = at; i < end; i += BLOCK)
            FOR_REAL(block)(j, i, (int)smaller(BLOCK, end - i), columns ? columns : sums, columns ? column : 0);
        for (int k = 0; columns && k < COLUMNS; k++)
            for (int64_t s = 0; s < column; s++) total[s] += columns[k * column + s];
    }
}
