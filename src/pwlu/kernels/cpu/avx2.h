/* Registers of 8 floats: AVX2. */
#define LANES 8
#define PARTS 4
#define REGISTER_ENTRIES 32
#define REGISTER_PAIRS 16 /* for more, two look-ups by permutation are slower than one look-up of a pair in memory */
#define V(name) _mm256_##name
#define store_places(p, s) _mm256_storeu_si256((__m256i *)(p), s)
#define as_indices _mm256_castps_si256
typedef __m256 lanes;
typedef __m256i indices;
typedef __m256d doubles;
INLINE doubles first_half(lanes v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
INLINE doubles second_half(lanes v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }

/* Load or store the first n < LANES floats. */
INLINE indices first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE lanes load_some(const float *p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
INLINE void store_some(float *p, lanes v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

/* Load 4 floats from each of the rows 0 and 4. */
INLINE lanes load_quads(const float *p, int64_t row) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * row), 1);
}

/* Convert registers with 4 positions of 2 rows to registers with 8 positions of one row. */
INLINE void exchange_quads(lanes *v) {
    for (int i = 0; i < 4; i++) {
        const lanes a = v[i], b = v[i + 4];
        v[i] = _mm256_permute2f128_ps(a, b, 0x20), v[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

/* Do the arithmetic of `finite`. max_ps and min_ps return the second operand if one is NaN. */
INLINE lanes finite_lanes(lanes x) {
    return _mm256_min_ps(_mm256_set1_ps(FLT_MAX), _mm256_max_ps(_mm256_set1_ps(-FLT_MAX), x));
}

/* Do the arithmetic of `locate`. For NaN, the last bits of the index are those of interval 0. */
INLINE indices locate_lanes(lanes v, lanes left, lanes scale, lanes right, int intervals, int lookup) {
    const lanes t = V(mul_ps)(V(sub_ps)(v, left), scale), end = V(set1_ps)((float)intervals);
    const lanes beyond = lookup ? _mm256_cmp_ps(t, end, _CMP_GE_OQ) : _mm256_cmp_ps(v, right, _CMP_GE_OQ);
    const lanes not_left = lookup ? _mm256_cmp_ps(t, V(setzero_ps)(), _CMP_NLT_UQ) : _mm256_cmp_ps(v, left, _CMP_NLT_UQ);
    const indices i = _mm256_cvttps_epi32(V(min_ps)(V(set1_ps)((float)(intervals - 1)), t));
    const indices s = _mm256_blendv_epi8(i, V(set1_epi32)(intervals), _mm256_castps_si256(beyond));
    return _mm256_and_si256(_mm256_add_epi32(s, V(set1_epi32)(1)), _mm256_castps_si256(not_left));
}

/* Add 1 where x is not less than the knot. A true comparison is -1 as an integer. */
INLINE indices count_lanes(indices found, lanes x, lanes knot) {
    return _mm256_sub_epi32(found, _mm256_castps_si256(_mm256_cmp_ps(x, knot, _CMP_GE_OQ)));
}

INLINE lanes look_up(const lanes *table, indices s, int parts) { /* bits 0-2 of s select the lane, bits 3-4 the register */
    const lanes bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(s, 28)), bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(s, 27));
    lanes v = _mm256_permutevar8x32_ps(table[0], s), high = v;
    if (parts > 1) v = _mm256_blendv_ps(v, _mm256_permutevar8x32_ps(table[1], s), bit3);
    if (parts > 2) high = _mm256_permutevar8x32_ps(table[2], s);
    if (parts > 3) high = _mm256_blendv_ps(high, _mm256_permutevar8x32_ps(table[3], s), bit3);
    return parts > 2 ? _mm256_blendv_ps(v, high, bit4) : v;
}
