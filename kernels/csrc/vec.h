/* vec: sixteen floats at a time, in the compiler's portable vector types. */
#ifndef LEGATO_VEC_H
#define LEGATO_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LG_INLINE static inline __attribute__((always_inline))
#define LG_LANES 16

typedef float lg_f32x16 __attribute__((vector_size(64)));
typedef int32_t lg_i32x16 __attribute__((vector_size(64)));
typedef uint32_t lg_u32x16 __attribute__((vector_size(64)));
typedef uint16_t lg_u16x16 __attribute__((vector_size(32)));

LG_INLINE lg_f32x16 lg_splat(float x) { return (lg_f32x16){} + x; }

LG_INLINE lg_f32x16 lg_load(const float *p) {
    lg_f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

LG_INLINE void lg_store(float *p, lg_f32x16 v) { memcpy(p, &v, sizeof v); }

/* The first `n` lanes, the others 0; 0 <= n; nothing beyond p[n] is touched. */
LG_INLINE lg_f32x16 lg_load_n(const float *p, int64_t n) {
    if (n >= LG_LANES) return lg_load(p);
#if defined(__AVX512F__)
    return (lg_f32x16)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
    lg_f32x16 v = {};
    memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
#endif
}

LG_INLINE void lg_store_n(float *p, lg_f32x16 v, int64_t n) {
    if (n >= LG_LANES) {
        lg_store(p, v);
        return;
    }
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
    memcpy(p, &v, (size_t)n * sizeof(float));
#endif
}

LG_INLINE lg_f32x16 lg_max(lg_f32x16 a, lg_f32x16 b) {
    lg_i32x16 m = a > b;
    return (lg_f32x16)(((lg_i32x16)a & m) | ((lg_i32x16)b & ~m));
}

LG_INLINE lg_f32x16 lg_min(lg_f32x16 a, lg_f32x16 b) {
    lg_i32x16 m = a < b;
    return (lg_f32x16)(((lg_i32x16)a & m) | ((lg_i32x16)b & ~m));
}

/* Sums of lanes in one fixed order, whatever the instruction set. */
LG_INLINE float lg_sum(lg_f32x16 v) {
    float x[LG_LANES];
    memcpy(x, &v, sizeof v);
    for (int width = LG_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

LG_INLINE float lg_max_lane(lg_f32x16 v) {
    float x[LG_LANES];
    memcpy(x, &v, sizeof v);
    float best = x[0];
    for (int i = 1; i < LG_LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

LG_INLINE lg_f32x16 lg_bf16_load(const uint16_t *p) {
    lg_u16x16 half;
    memcpy(&half, p, sizeof half);
    return (lg_f32x16)(__builtin_convertvector(half, lg_u32x16) << 16);
}

/* To the nearest bf16, ties to even; a NaN stays a NaN. */
LG_INLINE lg_u16x16 lg_to_bf16(lg_f32x16 v) {
    lg_u32x16 bits = (lg_u32x16)v;
    lg_u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    lg_u32x16 nan = (lg_u32x16)(v != v);
    rounded = (rounded & ~nan) | (((bits >> 16) | 0x40) & nan);
    return __builtin_convertvector(rounded, lg_u16x16);
}

LG_INLINE void lg_bf16_store(uint16_t *p, lg_f32x16 v) {
    lg_u16x16 half = lg_to_bf16(v);
    memcpy(p, &half, sizeof half);
}

LG_INLINE lg_f32x16 lg_f16_load(const uint16_t *p) {
#if defined(__AVX512F__)
    return (lg_f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    __m256 half[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                      _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
    lg_f32x16 v;
    memcpy(&v, half, sizeof v);
    return v;
#else
    lg_f32x16 v;
    for (int i = 0; i < LG_LANES; i++) {
        _Float16 h;
        memcpy(&h, p + i, sizeof h);
        v[i] = (float)h;
    }
    return v;
#endif
}

LG_INLINE void lg_f16_store(uint16_t *p, lg_f32x16 v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LG_LANES; i++) {
        _Float16 h = (_Float16)v[i];
        memcpy(p + i, &h, sizeof h);
    }
#endif
}

/* e^x within 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]. Below -87.3 it is 0, above 88.7
 * infinity; a NaN stays a NaN. */
LG_INLINE lg_f32x16 lg_exp(lg_f32x16 x) {
    const float log2e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;
    lg_f32x16 clamped = lg_min(lg_max(x, lg_splat(-87.33654f)), lg_splat(88.72283f));
    lg_f32x16 magic = lg_splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    lg_f32x16 n = clamped * log2e + magic - magic;
    lg_f32x16 r = clamped - n * ln2_high;
    r = r - n * ln2_low;
    lg_f32x16 y = lg_splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    /* In two factors: 2^128 alone is no float. */
    lg_i32x16 whole = __builtin_convertvector(n, lg_i32x16);
    lg_i32x16 half = whole >> 1;
    lg_f32x16 scale_a = (lg_f32x16)((half + 127) << 23);
    lg_f32x16 scale_b = (lg_f32x16)((whole - half + 127) << 23);
    y = y * scale_a * scale_b;
    lg_i32x16 low = x < -87.33654f, high = x > 88.72283f, nan = x != x;
    y = (lg_f32x16)((lg_i32x16)y & ~low);
    lg_f32x16 inf = lg_splat(INFINITY);
    y = (lg_f32x16)(((lg_i32x16)y & ~high) | ((lg_i32x16)inf & high));
    return (lg_f32x16)(((lg_i32x16)y & ~nan) | ((lg_i32x16)x & nan));
}

#endif
