/* Registers of 16 floats: AVX-512F. */
#define LANES 16
#define PARTS 5
#define REGISTER_ENTRIES 67 /* 64 intervals, two outer segments, and one entry for the sums of a norm */
#define REGISTER_PAIRS 66
#define V(name) _mm512_##name
#define store_places(p, s) _mm512_storeu_si512(p, s)
#define as_indices _mm512_castps_si512
typedef __m512 lanes;
typedef __m512i indices;
typedef __m512d doubles;
INLINE doubles first_half(lanes v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
INLINE doubles second_half(lanes v) {
    return _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}

/* Load or store the first n < LANES floats. */
INLINE lanes load_some(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1 << n) - 1), p); }
INLINE void store_some(float *p, lanes v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1 << n) - 1), v); }

/* Load 4 floats from each of the 4 rows 0, 4, 8 and 12. */
INLINE lanes load_quads(const float *p, int64_t row) {
    lanes v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(p + 4 * row));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(p + 8 * row));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(p + 12 * row));
}

/* Convert registers with 4 positions of 4 rows to registers with 16 positions of one row. */
INLINE void exchange_quads(lanes *v) {
    for (int i = 0; i < 4; i++) {
        const lanes a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee);
        const lanes c = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x44), d = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xee);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88), v[i + 4] = _mm512_shuffle_f32x4(a, c, 0xdd);
        v[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88), v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

/* Do the arithmetic of `finite`: replace minus and plus infinity by the largest finite numbers. */
INLINE lanes finite_lanes(lanes x) { return _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x00ef0000), 0); }

/* Do the arithmetic of `locate`, with comparisons as masks. For NaN, the last bits of the index are those of interval 0. */
INLINE indices locate_lanes(lanes v, lanes left, lanes scale, lanes right, int intervals, int lookup) {
    const lanes t = V(mul_ps)(V(sub_ps)(v, left), scale), end = V(set1_ps)((float)intervals);
    const __mmask16 below_end = lookup ? _mm512_cmp_ps_mask(t, end, _CMP_NGE_UQ) : _mm512_cmp_ps_mask(v, right, _CMP_NGE_UQ);
    const __mmask16 not_left =
        lookup ? _mm512_cmp_ps_mask(t, V(setzero_ps)(), _CMP_NLT_UQ) : _mm512_cmp_ps_mask(v, left, _CMP_NLT_UQ);
    const lanes clipped = V(min_ps)(V(set1_ps)((float)(intervals - 1)), t);
    const indices i = _mm512_mask_cvttps_epi32(V(set1_epi32)(intervals), below_end, clipped);
    return _mm512_maskz_add_epi32(not_left, i, V(set1_epi32)(1));
}

/* Add 1 where x is not less than the knot. */
INLINE indices count_lanes(indices found, lanes x, lanes knot) {
    return _mm512_mask_add_epi32(found, _mm512_cmp_ps_mask(x, knot, _CMP_GE_OQ), found, V(set1_epi32)(1));
}

INLINE lanes look_up(const lanes *table, indices s, int parts) { /* 5 bits of s select within two registers */
    const __mmask16 high = _mm512_cmpgt_epi32_mask(s, _mm512_set1_epi32(31)),
                    highest = _mm512_cmpgt_epi32_mask(s, _mm512_set1_epi32(63));
    lanes v = _mm512_permutex2var_ps(table[0], s, table[1]);
    if (parts > 2) v = _mm512_mask_mov_ps(v, high, _mm512_permutex2var_ps(table[2], s, table[3]));
    if (parts > 4) v = _mm512_mask_mov_ps(v, highest, _mm512_permutexvar_ps(s, table[4]));
    return v;
}
