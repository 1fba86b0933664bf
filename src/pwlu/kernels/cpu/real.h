/* Define all code for one REAL: float (for float32, bfloat16 and float16) or double. cpu.c includes this file twice. */
#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)
#define FOR_REAL(name) NAMED(name, REAL)

#include "element.h"

#if defined(VECTORS) && defined(__AVX512F__)
#include "avx512.h"
#elif defined(VECTORS)
#include "avx2.h"
#endif
#ifdef VECTORS
#include "lanes.h"
#define IN_REGISTERS(j) fits_registers(j)
#define MAP_PLANE map_plane
#define MAP_PANEL map_panel
#define LOCATE_ROW locate_row
#define SUMS_OF sums_of_vectors
#define SUMS_OF_ROWS sums_of_rows_of_vectors
#else
#define LANES 1
#define IN_REGISTERS(j) 0
#define MAP_PLANE(...) ((void)0)
#define MAP_PANEL(...) ((void)0)
#define LOCATE_ROW FOR_REAL(locate_row)
#define SUMS_OF FOR_REAL(sums_of)
#define SUMS_OF_ROWS FOR_REAL(sums_of_rows)
#endif

#include "norm.h"
#include "knots.h"
#include "table.h"
#include "moments.h"
#include "norm_state.h"
#include "planes.h"
#include "rows.h"

/* Process one unit: a contiguous part of memory, with its own sums. */
static void FOR_REAL(walk)(job *j, int64_t unit) {
    const int64_t at = unit * j->chunk, stop = smaller(size_of(j), at + j->chunk), column = 2 * j->segments;
    double *sums = j->sums ? j->sums + unit * j->channels * column : NULL;
    if (sums) memset(sums, 0, sizeof(double) * (size_t)(j->channels * column));
    if (in_rows(j)) FOR_REAL(map_rows)(j, at, stop, sums);
    else if (j->intervals) FOR_REAL(map_planes)(j, at, stop, sums, j->columns ? j->columns + unit * COLUMNS * column : NULL);
    else FOR_REAL(moments_of_planes)(j, at, stop, sums);
}

static void FOR_REAL(finish)(job *j, int64_t unit) {
    const int64_t first = unit * channels_per_unit(j), stop = smaller(j->channels, first + channels_per_unit(j));
    for (int64_t c = first; c < stop; c++) {
        if (j->intervals) FOR_REAL(finish_gradients)(j, c);
        else FOR_REAL(finish_moments)(j, c);
    }
}

static void FOR_REAL(execute)(job *j) {
    const int64_t channel_units = ceil_div(j->channels, channels_per_unit(j));
    run(j, FOR_REAL(prepare), channel_units);
    if (in_rows(j)) FOR_REAL(spread)(j);
    run(j, FOR_REAL(walk), j->units);
    if (j->sums) run(j, FOR_REAL(finish), channel_units);
}

#undef LANES
#undef IN_REGISTERS
#undef MAP_PLANE
#undef MAP_PANEL
#undef LOCATE_ROW
#undef SUMS_OF
#undef SUMS_OF_ROWS
#undef JOIN
#undef NAMED
#undef FOR_REAL
