/* attention_tile: 64 keys and values at a time, packed for a register-blocked product. */
#ifndef LEGATO_ATTENTION_TILE_H
#define LEGATO_ATTENTION_TILE_H

#include "kv_rows.h"

#define TILE_KEYS 64
#define KEY_VECTORS (TILE_KEYS / LG_LANES)
/* A block of accumulators that fits into the registers. */
#if defined(__AVX512F__)
#define BLOCK_ROWS 6
#define BLOCK_VECTORS 4
#else
#define BLOCK_ROWS 4
#define BLOCK_VECTORS 1
#endif
/* In pairs mode a 32-bit element is two neighbours in bf16, multiplied and added at once. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

LG_INLINE int64_t lg_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* a * b + c in one rounding, wherever the compiler inlines it. */
LG_INLINE lg_f32x16 lg_fma(lg_f32x16 a, lg_f32x16 b, lg_f32x16 c) {
#if defined(__AVX512F__)
    return (lg_f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c; /* contracted where there is an instruction for it */
#endif
}

/* 2^x for x <= 0 within 2 ulp; below -126 it is 0; a NaN stays a NaN. 2^0 is 1 exactly. */
LG_INLINE lg_f32x16 lg_exp2(lg_f32x16 x) {
#if defined(__AVX512F__)
    /* max returns its second operand where one is a NaN. */
    x = (lg_f32x16)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    lg_f32x16 n = (lg_f32x16)_mm512_roundscale_ps((__m512)x, 0);
#else
    lg_i32x16 low = x < -126.0f;
    x = lg_select(x < -200.0f, lg_splat(-200.0f), x);
    lg_f32x16 magic = lg_splat(12582912.0f); /* 1.5 * 2^23 */
    lg_f32x16 n = x + magic - magic;
#endif
    lg_f32x16 r = x - n;
    lg_f32x16 y = lg_splat(1.326511963e-03f);
    y = lg_fma(y, r, lg_splat(9.671499953e-03f));
    y = lg_fma(y, r, lg_splat(5.550732464e-02f));
    y = lg_fma(y, r, lg_splat(2.402224243e-01f));
    y = lg_fma(y, r, lg_splat(6.931470037e-01f));
    y = lg_fma(y, r, lg_splat(1.0f));
#if defined(__AVX512F__)
    return (lg_f32x16)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    lg_i32x16 exponent = __builtin_convertvector(n, lg_i32x16) + 127;
    return (lg_f32x16)((lg_i32x16)(y * (lg_f32x16)(exponent << 23)) & ~low);
#endif
}

LG_INLINE float lg_largest_lane(lg_f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return lg_max_lane(v);
#endif
}

/* rows[16][16] of 32 bits to out[16][stride], transposed; only `depth` rows of out are written. */
LG_INLINE void lg_transpose(const lg_u32x16 *rows, uint32_t *out, int64_t stride, int64_t depth) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* b[4 q + i] holds columns i, 4 + i, 8 + i, 12 + i of rows 4 q.. */
        __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        __m512i high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        a[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
        a[8 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        a[4 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < depth) _mm512_storeu_si512(out + i * stride, a[i]);
#else
    for (int64_t i = 0; i < (depth < 16 ? depth : 16); i++)
        for (int r = 0; r < 16; r++) out[i * stride + r] = rows[r][i];
#endif
}

#if HAS_PAIRS
LG_INLINE void lg_store_pairs(uint32_t *p, lg_f32x16 v) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

/* 32 elements from i on as bf16, of which `left` are left; 8-bit values are exact in bf16. */
LG_INLINE __m512i load_pairs(int dtype, const void *row, int64_t i, int64_t left) {
    const __mmask32 kept = left >= 32 ? 0xffffffffu : (1u << left) - 1u;
    if (dtype == LG_KV_BF16)
        return _mm512_maskz_loadu_epi16(kept, (const uint16_t *)row + i);
    const __m256i bytes = _mm256_maskz_loadu_epi8(kept, (const uint8_t *)row + i);
    if (dtype == LG_KV_INT8) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    /* Below 8 it is m * 2^-9: looked up, since bf16 products take subnormals for zeros. */
    const __m512i small = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    v = _mm512_mask_permutexvar_epi16(
        v, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
    v = _mm512_mask_mov_epi16(
        v, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(
        v, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8));
}
#endif

/* Which rows of the pages the keys of a tile are, and as many that will be wanted later: fetching
 * these is what keeps the memory busy, as the hardware cannot foresee the jumps between blocks. */
typedef struct {
    int64_t places[TILE_KEYS]; /* negative: not to be read */
    int64_t ahead[TILE_KEYS];  /* any row where nothing is wanted */
} lg_tile_rows;

/* Into the second level: fetches into the first were half as quick. */
LG_INLINE void fetch_ahead(const char *row) { __builtin_prefetch(row, 0, 2); }

/* K of a tile, transposed: out[depth][TILE_KEYS]. Keys that are not to be read are zeros.
 * depth: head_dim, or in pairs half of it; whole: all keys are to be read. */
LG_INLINE void lg_pack_keys(int dtype, int pairs, int whole, const char *pages,
                            const lg_tile_rows *tile, int64_t head_dim, uint32_t *out) {
    const int64_t bytes = lg_kv_bytes(dtype), depth = pairs ? head_dim / 2 : head_dim;
    const int64_t row_bytes = head_dim * bytes;
    for (int64_t key = 0; key < TILE_KEYS; key += LG_LANES) {
        for (int64_t d = 0; d < depth; d += LG_LANES) {
            lg_u32x16 rows[LG_LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LG_LANES; r++) {
                const int64_t place = tile->places[key + r];
                const char *row = pages + place * row_bytes;
                fetch_ahead(pages + tile->ahead[key + r] * row_bytes + d * bytes * (1 + pairs));
                rows[r] = (lg_u32x16){};
                if (!whole && place < 0) continue;
#if HAS_PAIRS
                if (pairs)
                    rows[r] = (lg_u32x16)load_pairs(dtype, row, 2 * d, head_dim - 2 * d);
                else
#endif
                    rows[r] = (lg_u32x16)lg_kv_load(dtype, row, d, head_dim - d);
            }
            lg_transpose(rows, out + d * TILE_KEYS + key, TILE_KEYS, depth - d);
        }
    }
}

/* V of keys [begin, end) of a tile: out[keys][width] floats or out[keys / 2][width] pairs of
 * keys, padded with zeros to `width`, a multiple of 16. In pairs begin and end are even. */
LG_INLINE void lg_pack_values(int dtype, int pairs, const char *pages, const lg_tile_rows *tile,
                              int64_t begin, int64_t end, int64_t head_dim, int64_t width,
                              uint32_t *out) {
    const int64_t bytes = lg_kv_bytes(dtype), row_bytes = head_dim * bytes;
    const int64_t *places = tile->places, *ahead = tile->ahead;
#if HAS_PAIRS
    if (pairs) {
        __m512i low, high; /* the places of (a0, b0, a1, b1, ...) in a and b */
        uint16_t order[2][32];
        for (int i = 0; i < 32; i++) {
            order[0][i] = (uint16_t)(i / 2 + i % 2 * 32);
            order[1][i] = (uint16_t)(16 + i / 2 + i % 2 * 32);
        }
        memcpy(&low, order[0], sizeof low);
        memcpy(&high, order[1], sizeof high);
        for (int64_t key = begin; key < end; key += 2) {
            for (int64_t d = 0; d < width; d += 32) {
                __m512i a = _mm512_setzero_si512(), b = a;
                uint32_t *to = out + key / 2 * width + d;
                fetch_ahead(pages + ahead[key] * row_bytes + d * bytes);
                fetch_ahead(pages + ahead[key + 1] * row_bytes + d * bytes);
                if (places[key] >= 0)
                    a = load_pairs(dtype, pages + places[key] * row_bytes, d, head_dim - d);
                if (places[key + 1] >= 0)
                    b = load_pairs(dtype, pages + places[key + 1] * row_bytes, d, head_dim - d);
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
                if (d + 16 < width)
                    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
            }
        }
        return;
    }
#endif
    for (int64_t key = begin; key < end; key++)
        for (int64_t d = 0; d < width; d += LG_LANES) {
            lg_f32x16 v = {};
            fetch_ahead(pages + ahead[key] * row_bytes + d * bytes);
            if (places[key] >= 0)
                v = lg_kv_load(dtype, pages + places[key] * row_bytes, d, head_dim - d);
            lg_store((float *)out + key * width + d, v);
        }
}

/* c[rows][16 vectors] = (scale ? c * scale[row] : 0) + a[rows][depth] b[depth][16 vectors], each
 * sum in the order of depth. a and b hold floats or pairs. */
LG_INLINE void block_product(int rows, int vectors, int pairs, int64_t depth, const uint32_t *a,
                             int64_t a_stride, const uint32_t *b, int64_t b_stride,
                             const float *scale, float *c, int64_t c_stride) {
    lg_f32x16 sums[BLOCK_ROWS][BLOCK_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[r][v] = scale == NULL ? (lg_f32x16){}
                                       : lg_load(c + r * c_stride + v * LG_LANES) * scale[r];
    for (int64_t k = 0; k < depth; k++) {
        lg_f32x16 columns[BLOCK_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            columns[v] = lg_load((const float *)b + k * b_stride + v * LG_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            lg_f32x16 left = (lg_f32x16)((lg_u32x16){} + a[r * a_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
#if HAS_PAIRS
                if (pairs)
                    sums[r][v] = (lg_f32x16)_mm512_dpbf16_ps(
                        (__m512)sums[r][v], (__m512bh)left, (__m512bh)columns[v]);
                else
#endif
                    sums[r][v] = lg_fma(left, columns[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) lg_store(c + r * c_stride + v * LG_LANES, sums[r][v]);
}

#endif
