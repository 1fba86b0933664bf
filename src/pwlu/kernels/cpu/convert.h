/* Convert from and to bfloat16 and float16, rounding to nearest even. */
#if defined(__F16C__) || (defined(_MSC_VER) && defined(__AVX2__))
#define HALF_INSTRUCTIONS 1
#endif

static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t to_bfloat16(float f) {
    uint32_t u = bits_of(f);
    return f != f ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#ifndef HALF_INSTRUCTIONS
static inline float from_float16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) return float_of(sign | 0x7f800000u | magnitude); /* inf, nan */
    return float_of(sign | bits_of(float_of(magnitude) * 0x1p112f)); /* adjusts the exponent bias, also for denormals */
}

static inline uint16_t to_float16(float f) {
    uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000u) { /* denormal: after adding 0.5, the last bits of the mantissa are the rounded result */
        return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}
#endif

static void widen(int dtype, const uint16_t *from, float *to, int n) {
    int i = 0;
    if (dtype == BFLOAT16) {
        for (; i < n; i++) to[i] = float_of((uint32_t)from[i] << 16);
        return;
    }
#ifdef HALF_INSTRUCTIONS
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(from[i])));
#else
    for (; i < n; i++) to[i] = from_float16(from[i]);
#endif
}

static void narrow(int dtype, const float *from, uint16_t *to, int n) {
    int i = 0;
    if (dtype == BFLOAT16) {
        for (; i < n; i++) to[i] = to_bfloat16(from[i]);
        return;
    }
#ifdef HALF_INSTRUCTIONS
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    for (; i < n; i++) to[i] = (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(from[i]), 0));
#else
    for (; i < n; i++) to[i] = to_float16(from[i]);
#endif
}
