/* Process rows, for one REAL: `inner` is short, so neighbours belong to different channels. Up to TILE rows are processed
 * together, one panel of positions at a time. */

/* Process positions [p, p + n) of `count` rows. `at` is the first element. If the tables fit into vector registers,
 * transpose tiles. Add to the sums along the rows: neighbours belong to different channels, so the additions do not
 * wait for each other. */
static void FOR_REAL(panel)(const job *j, int64_t at, int count, int64_t p, int n, double *sums) {
    const int64_t next = after_rows(j, at, count, p);
    _Alignas(64) REAL x_buffer[TILE * WIDTH], grad_buffer[TILE * WIDTH], out_buffer[TILE * WIDTH], z_buffer[TILE * WIDTH];
    _Alignas(64) int32_t place[TILE * WIDTH + TILE];
    const int tiles = IN_REGISTERS(j) && count % LANES == 0 && n >= LANES && !j->grad_is_of_z;
    const int in_place = j->dtype <= FLOAT64;
    const int64_t row = in_place ? j->positions : WIDTH, x_row = j->norm && !j->grad_is_of_z ? WIDTH : row,
                  out_row = j->y ? row : WIDTH;
    const REAL *given = FOR_REAL(read_rows)(j, j->x, at, count, n, x_buffer), *x = given;
    const REAL *grad = FOR_REAL(read_rows)(j, j->grad, at, count, n, grad_buffer);
    REAL *out = j->y && in_place ? (REAL *)j->y + at : j->y || j->norm ? out_buffer : NULL;
    for (int r = count - 1; r >= 0 && j->norm; r--)
        x = FOR_REAL(normalized)(j, at + r * j->positions, p, given + r * row, n, 1, z_buffer + r * WIDTH);
    for (int r = 0; r < count && !j->grad_is_of_z; r += tiles ? LANES : 1) {
        if (tiles)
            MAP_PANEL(j, p, x + r * x_row, x_row, grad ? grad + r * row : NULL, row, out ? out + r * out_row : NULL, out_row, n,
                      place + r * WIDTH, next + r * n);
        else LOCATE_ROW(j, p, x + r * x_row, n, place + r * WIDTH);
    }
    for (int r = 0; r < count && (sums || !tiles); r++) {
        if (!tiles) fetch(j, next + r * n, n);
        const REAL *x_here = x + r * x_row, *grad_here = grad ? grad + r * row : NULL;
        if (out && !tiles && !j->grad_is_of_z)
            FOR_REAL(apply)(j->table, x_here, grad_here, place + r * WIDTH, n, out + r * out_row);
        if (sums && tiles)
            FOR_REAL(accumulate)(grad_here, x_here, place + r / LANES * LANES * WIDTH + r % LANES, LANES, n, sums, 0);
        else if (sums) FOR_REAL(accumulate)(grad_here, x_here, place + r * WIDTH, 1, n, sums, 0);
    }
    if (sums && j->norm) FOR_REAL(norm_sums_of_panel)(j, p, out, out_row, given, row, count, n, sums);
    for (int r = 0; r < count && j->norm_input; r++)
        FOR_REAL(norm_gradient)(j, p, j->grad_is_of_z ? grad + r * row : out + r * out_row, given + r * row, n, 1,
                                out + r * out_row);
    for (int r = 0; r < count && j->y && out == out_buffer; r++)
        narrow(j->dtype, (const float *)out + r * WIDTH, (uint16_t *)j->y + at + r * j->positions, n);
}

/* Process elements [at, stop): whole rows, and at most one partial row at the end. Without tables and sums (grad_is_of_z), process one
 * row at a time, in memory order. */
static void FOR_REAL(map_rows)(const job *j, int64_t at, int64_t stop, double *sums) {
    for (int count; at < stop; at += count * j->positions) {
        count = j->grad_is_of_z ? 1 : (int)larger(1, smaller(TILE, (stop - at) / j->positions));
        const int64_t width = smaller(j->positions, stop - at);
        for (int64_t p = 0, n; p < width; p += n) {
            n = j->grad_is_of_z ? smaller(width - p, BLOCK) : width - p <= WIDTH ? width - p : PANEL;
            if (j->intervals) FOR_REAL(panel)(j, at + p, count, p, (int)n, sums);
            else FOR_REAL(moments_of_panel)(j, at + p, count, p, (int)n, sums);
        }
    }
}
