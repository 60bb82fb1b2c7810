/* kv_rows: the dtypes of KV pages, and sixteen elements of a row to floats and back. */
#ifndef LEGATO_KV_ROWS_H
#define LEGATO_KV_ROWS_H

#include "vec.h"

/* As kernels/kv_pages.py counts them. */
enum { LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_INT8, LG_KV_FP8, LG_KV_DTYPES };

typedef uint8_t lg_u8x16 __attribute__((vector_size(16)));
typedef int8_t lg_i8x16 __attribute__((vector_size(16)));

LG_INLINE int64_t lg_kv_bytes(int dtype) {
    return dtype == LG_KV_F32 ? 4 : dtype == LG_KV_BF16 || dtype == LG_KV_F16 ? 2 : 1;
}

/* mask ? a : b, lane by lane. */
LG_INLINE lg_f32x16 lg_select(lg_i32x16 mask, lg_f32x16 a, lg_f32x16 b) {
    return (lg_f32x16)(((lg_i32x16)a & mask) | ((lg_i32x16)b & ~mask));
}

/* To the nearest whole number, ties to even, for |v| < 2^31. No sum of v and a constant: the
 * compiler would fuse it with the product before it. */
LG_INLINE lg_i32x16 lg_round(lg_f32x16 v) {
#if defined(__AVX512F__)
    return (lg_i32x16)_mm512_cvtps_epi32((__m512)v);
#else
    lg_f32x16 whole;
    for (int i = 0; i < LG_LANES; i++) whole[i] = nearbyintf(v[i]);
    return __builtin_convertvector(whole, lg_i32x16);
#endif
}

/* Sixteen bytes to 32 bits; the compiler's own conversion goes byte by byte. */
LG_INLINE lg_i32x16 lg_widen_signed(const int8_t *p) {
#if defined(__AVX512F__)
    return (lg_i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    __m256i half[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                       _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
    lg_i32x16 wide;
    memcpy(&wide, half, sizeof wide);
    return wide;
#else
    lg_i8x16 bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, lg_i32x16);
#endif
}

/* e4m3 without infinities: 4 bits of exponent (bias 7), 3 of mantissa; 0x7f is NaN. */
LG_INLINE float lg_fp8_value(uint8_t bits) {
    const uint32_t magnitude = bits & 0x7f;
    const float v = magnitude == 0x7f ? NAN
                    : magnitude < 8   ? (float)magnitude * 0x1p-9f
                                      : ldexpf((float)(8 + magnitude % 8), (int)magnitude / 8 - 10);
    return bits & 0x80 ? -v : v;
}

#if !defined(__AVX512F__)
static float lg_fp8_values[256];
__attribute__((constructor)) static void fill_fp8_values(void) {
    for (int i = 0; i < 256; i++) lg_fp8_values[i] = lg_fp8_value((uint8_t)i);
}
#endif

LG_INLINE lg_f32x16 lg_fp8_load(const uint8_t *p) {
#if defined(__AVX512F__)
    lg_u32x16 bits = (lg_u32x16)lg_widen_signed((const int8_t *)p), magnitude = bits & 0x7f;
    lg_f32x16 normal = (lg_f32x16)((magnitude << 20) + (120u << 23));
    lg_f32x16 small = __builtin_convertvector((lg_i32x16)magnitude, lg_f32x16) * 0x1p-9f;
    lg_f32x16 v = lg_select((lg_i32x16)(magnitude < 8), small, normal);
    lg_i32x16 nan = (lg_i32x16)(magnitude == 0x7f);
    return (lg_f32x16)((lg_i32x16)v | (nan & 0x7fc00000) | (lg_i32x16)((bits & 0x80) << 24));
#else
    float v[LG_LANES];
    for (int i = 0; i < LG_LANES; i++) v[i] = lg_fp8_values[p[i]];
    return lg_load(v);
#endif
}

/* To the nearest, ties to even; beyond 464 it is NaN. */
LG_INLINE void lg_fp8_store(uint8_t *p, lg_f32x16 v) {
    lg_u32x16 bits = (lg_u32x16)v, sign = (bits >> 24) & 0x80;
    bits &= 0x7fffffff;
    lg_u32x16 normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
    lg_u32x16 is_small = (lg_u32x16)(bits < (121u << 23));
    lg_f32x16 small = (lg_f32x16)(bits & is_small) * 512.0f;
    lg_u32x16 rounded = ((lg_u32x16)lg_round(small) & is_small) | (normal & ~is_small);
    lg_u32x16 nan = (lg_u32x16)(bits >= (1087u << 20)); /* 480, as torch has it */
    lg_u8x16 out = __builtin_convertvector((rounded & ~nan) | (nan & 0x7f) | sign, lg_u8x16);
    memcpy(p, &out, sizeof out);
}

LG_INLINE lg_f32x16 lg_int8_load(const int8_t *p) {
    return __builtin_convertvector(lg_widen_signed(p), lg_f32x16);
}

LG_INLINE void lg_int8_store(int8_t *p, lg_f32x16 v) {
    lg_i32x16 whole = lg_round(lg_min(lg_max(v, lg_splat(-127.0f)), lg_splat(127.0f)));
    lg_i8x16 out = __builtin_convertvector(whole, lg_i8x16);
    memcpy(p, &out, sizeof out);
}

/* Lanes [i, i + 16) of a row of which `left` elements are left at i; the others are 0 and not read. */
LG_INLINE lg_f32x16 lg_kv_load(int dtype, const void *row, int64_t i, int64_t left) {
    const char *p = (const char *)row + i * lg_kv_bytes(dtype);
    char kept[LG_LANES * sizeof(float)] = {};
    if (dtype == LG_KV_F32) return lg_load_n((const float *)p, left);
    if (left < LG_LANES) {
        memcpy(kept, p, (size_t)(left * lg_kv_bytes(dtype)));
        p = kept;
    }
    if (dtype == LG_KV_BF16) return lg_bf16_load((const uint16_t *)p);
    if (dtype == LG_KV_F16) return lg_f16_load((const uint16_t *)p);
    if (dtype == LG_KV_INT8) return lg_int8_load((const int8_t *)p);
    return lg_fp8_load((const uint8_t *)p);
}

LG_INLINE void lg_kv_store(int dtype, void *row, int64_t i, lg_f32x16 v, int64_t left) {
    char *p = (char *)row + i * lg_kv_bytes(dtype);
    char kept[LG_LANES * sizeof(float)];
    if (dtype == LG_KV_F32) {
        lg_store_n((float *)p, v, left);
        return;
    }
    char *to = left < LG_LANES ? kept : p;
    if (dtype == LG_KV_BF16) lg_bf16_store((uint16_t *)to, v);
    if (dtype == LG_KV_F16) lg_f16_store((uint16_t *)to, v);
    if (dtype == LG_KV_INT8) lg_int8_store((int8_t *)to, v);
    if (dtype == LG_KV_FP8) lg_fp8_store((uint8_t *)to, v);
    if (left < LG_LANES) memcpy(p, kept, (size_t)(left * lg_kv_bytes(dtype)));
}

/* The largest magnitudes so far, lane by lane, and where a NaN was: max would lose it. */
LG_INLINE void lg_kv_see(lg_f32x16 v, lg_f32x16 *most, lg_i32x16 *nan) {
    *most = lg_max(*most, (lg_f32x16)((lg_i32x16)v & 0x7fffffff));
    *nan |= v != v;
}

/* As kernels/kv_quantize.py: the scale of a head that was seen is max|row| / limit, 0 for (nearly)
 * zeros. Returns what its elements are multiplied with. */
LG_INLINE float lg_kv_scale(int dtype, lg_f32x16 most, lg_i32x16 nan, float *scale) {
#if defined(__AVX512F__)
    float found = _mm512_reduce_max_ps((__m512)most);
    if (_mm512_test_epi32_mask((__m512i)nan, (__m512i)nan)) found = NAN;
#else
    float found = lg_max_lane((lg_f32x16)(nan & 0x3f800000)) > 0.0f ? NAN : lg_max_lane(most);
#endif
    found /= dtype == LG_KV_INT8 ? 127.0f : 448.0f;
    if (found < 0x1p-126f) found = 0.0f;
    *scale = found;
    return found > 0.0f ? 1.0f / found : 0.0f;
}

#endif
