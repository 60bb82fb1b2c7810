/* attention_tile: 64 keys and values at a time, packed for a register-blocked product. */
#ifndef LEGATO_ATTENTION_TILE_H
#define LEGATO_ATTENTION_TILE_H

#include "kv_rows.h"

#define TILE_KEYS 64
#define KEY_VECTORS (TILE_KEYS / LG_LANES)
/* A block of accumulators that fits into the registers. */
#define BLOCK_ROWS 6
#if defined(__AVX512F__)
#define BLOCK_VECTORS 4
#define REGISTER_LANES 16
#else
#define BLOCK_VECTORS 1
#define REGISTER_LANES (sizeof(lg_register) / sizeof(float))
#endif
/* What one register holds: the compiler keeps wider vectors in memory. */
#if defined(__AVX512F__)
typedef lg_f32x16 lg_register;
typedef lg_i32x16 lg_register_mask;
#elif defined(__AVX2__)
typedef float lg_register __attribute__((vector_size(32)));
typedef int32_t lg_register_mask __attribute__((vector_size(32)));
#else
typedef float lg_register __attribute__((vector_size(16)));
typedef int32_t lg_register_mask __attribute__((vector_size(16)));
#endif
/* In pairs mode a 32-bit element is two neighbours in bf16, multiplied and added at once. */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

LG_INLINE int64_t lg_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

LG_INLINE lg_register lg_load_register(const float *p) {
    lg_register v;
    memcpy(&v, p, sizeof v);
    return v;
}

LG_INLINE void lg_store_register(float *p, lg_register v) { memcpy(p, &v, sizeof v); }

/* x - 0 is x itself, x + 0 an addition. */
LG_INLINE lg_register lg_spread(float x) { return x - (lg_register){}; }

LG_INLINE lg_register lg_choose(lg_register_mask mask, lg_register a, lg_register b) {
    return (lg_register)(((lg_register_mask)a & mask) | ((lg_register_mask)b & ~mask));
}

/* b where it is the larger one, and where either is a NaN. */
LG_INLINE lg_register lg_larger(lg_register a, lg_register b) {
#if defined(__AVX512F__)
    return (lg_register)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (lg_register)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return lg_choose(a > b, a, b);
#endif
}

/* a * b + c in one rounding, wherever the compiler inlines it. */
LG_INLINE lg_register lg_fma(lg_register a, lg_register b, lg_register c) {
#if defined(__AVX512F__)
    return (lg_register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (lg_register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c; /* contracted where there is an instruction for it */
#endif
}

/* 2^x for x <= 0 within 2 ulp; below -126 it may be 0, below -150 it is; a NaN stays a NaN. 2^0 is 1
 * exactly. */
LG_INLINE lg_register lg_exp2(lg_register x) {
    x = lg_larger(lg_spread(-200.0f), x);
#if defined(__AVX512F__)
    const lg_register n = (lg_register)_mm512_roundscale_ps((__m512)x, 0);
#elif defined(__AVX2__)
    const lg_register n = (lg_register)_mm256_round_ps((__m256)x, 8);
#else
    const lg_register magic = lg_spread(12582912.0f); /* 1.5 * 2^23 */
    const lg_register n = x + magic - magic;
#endif
    const lg_register r = x - n;
    lg_register y = lg_spread(1.326511963e-03f);
    y = lg_fma(y, r, lg_spread(9.671499953e-03f));
    y = lg_fma(y, r, lg_spread(5.550732464e-02f));
    y = lg_fma(y, r, lg_spread(2.402224243e-01f));
    y = lg_fma(y, r, lg_spread(6.931470037e-01f));
    y = lg_fma(y, r, lg_spread(1.0f));
#if defined(__AVX512F__)
    return (lg_register)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    const lg_register_mask exponent = __builtin_convertvector(n, lg_register_mask) + 127;
    const lg_register_mask kept = ~(x < -126.0f);
    return (lg_register)((lg_register_mask)(y * (lg_register)(exponent << 23)) & kept);
#endif
}

LG_INLINE float lg_largest_lane(lg_register v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (size_t i = 1; i < REGISTER_LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
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
#elif defined(__AVX2__)
    for (int quarter = 0; quarter < 4; quarter++) { /* 8 by 8 */
        const int row = quarter / 2 * 8, column = quarter % 2 * 8;
        const float *from = (const float *)rows + row * 16 + column;
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i += 2) {
            const __m256 x = _mm256_loadu_ps(from + i * 16), y = _mm256_loadu_ps(from + i * 16 + 16);
            a[i] = _mm256_unpacklo_ps(x, y);
            a[i + 1] = _mm256_unpackhi_ps(x, y);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; j++) {
                b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
                b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
            }
        for (int i = 0; i < 4; i++) {
            float *to = (float *)out + row + (column + i) * stride;
            if (column + i < depth)
                _mm256_storeu_ps(to, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
            if (column + i + 4 < depth)
                _mm256_storeu_ps(to + 4 * stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
        }
    }
#else
    for (int64_t i = 0; i < (depth < 16 ? depth : 16); i++)
        for (int r = 0; r < 16; r++) out[i * stride + r] = rows[r][i];
#endif
}

#if HAS_PAIRS
typedef uint16_t lg_u16x32 __attribute__((vector_size(64)));

LG_INLINE void lg_store_pairs(uint32_t *p, lg_f32x16 v) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}

/* 32 elements of bf16 from i on, of which `left` are left. */
LG_INLINE __m512i load_pairs(const void *row, int64_t i, int64_t left) {
    const __mmask32 kept = left >= 32 ? 0xffffffffu : (1u << left) - 1u;
    return _mm512_maskz_loadu_epi16(kept, (const uint16_t *)row + i);
}

/* Of 64 bytes from byte i on, those within a row of `row_bytes`. */
LG_INLINE __mmask64 bytes_within(int64_t i, int64_t row_bytes) {
    const int64_t left = row_bytes - i;
    return left >= 64 ? ~0ull : left <= 0 ? 0 : (1ull << left) - 1ull;
}

/* 64 elements of 8 bits. */
LG_INLINE __m512i load_bytes(const void *row, int64_t i, int64_t left) {
    const __mmask64 kept = left >= 64 ? ~0ull : (1ull << left) - 1ull;
    return _mm512_maskz_loadu_epi8(kept, (const uint8_t *)row + i);
}

/* bf16 of the magnitudes 0 ... 127 of int8 and fp8, which it holds exactly: low and high bytes. */
static uint8_t magnitudes[2][2][128];
__attribute__((constructor)) static void fill_magnitudes(void) {
    uint8_t from[LG_LANES];
    uint16_t to[LG_LANES];
    for (int fp8 = 0; fp8 < 2; fp8++)
        for (int first = 0; first < 128; first += LG_LANES) {
            for (int i = 0; i < LG_LANES; i++) from[i] = (uint8_t)(first + i);
            lg_bf16_store(to, fp8 ? lg_fp8_load(from) : lg_int8_load((int8_t *)from));
            for (int i = 0; i < LG_LANES; i++) {
                magnitudes[fp8][0][first + i] = (uint8_t)to[i];
                magnitudes[fp8][1][first + i] = (uint8_t)(to[i] >> 8);
            }
        }
}

/* The tables and orders by which 8-bit elements become bf16. */
typedef struct {
    __m512i table[4]; /* low bytes of magnitudes, high bytes */
    __m512i first, second; /* (low, high) of places 0, 1, 4, 5, 8 ... and of places 2, 3, 6, 7, 10 ... */
    __m512i even, odd;     /* (low, high) of places 0 ... 31 and 32 ... 63 */
} byte_orders;

LG_INLINE byte_orders make_byte_orders(int dtype) {
    byte_orders o;
    uint8_t order[4][64];
    for (int i = 0; i < 64; i++) {
        const int from_high = i % 2 * 64, pair = i % 4 / 2;
        order[0][i] = (uint8_t)(i / 4 * 4 + pair + from_high);
        order[1][i] = (uint8_t)(i / 4 * 4 + 2 + pair + from_high);
        order[2][i] = (uint8_t)(i / 2 + from_high);
        order[3][i] = (uint8_t)(i / 2 + 32 + from_high);
    }
    memcpy(o.table, magnitudes[dtype == LG_KV_FP8], sizeof o.table);
    memcpy(&o.first, order[0], 64);
    memcpy(&o.second, order[1], 64);
    memcpy(&o.even, order[2], 64);
    memcpy(&o.odd, order[3], 64);
    return o;
}

/* Low and high bytes of 64 elements in bf16. */
LG_INLINE void widen_bytes(int dtype, const byte_orders *o, __m512i bytes, __m512i *low,
                           __m512i *high) {
    const __m512i place = dtype == LG_KV_INT8 ? _mm512_abs_epi8(bytes) : bytes; /* 7 bits count */
    *low = _mm512_permutex2var_epi8(o->table[0], place, o->table[1]);
    *high = _mm512_permutex2var_epi8(o->table[2], place, o->table[3]);
    *high = _mm512_ternarylogic_epi32(*high, bytes, _mm512_set1_epi8(-128), 0xf8); /* a | b & c */
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

/* K of 16 keys, 16 lanes from d on, as rows of a matrix. */
LG_INLINE void load_keys(int dtype, int pairs, int whole, const char *pages,
                         const lg_tile_rows *tile, int64_t key, int64_t head_dim, int64_t d,
                         int64_t lane_elements, lg_u32x16 *rows) {
    const int64_t bytes = lg_kv_bytes(dtype), row_bytes = head_dim * bytes;
    const int64_t i = d * lane_elements, left = head_dim - i;
#pragma GCC unroll 16
    for (int r = 0; r < LG_LANES; r++) {
        const int64_t place = tile->places[key + r];
        const char *row = pages + place * row_bytes;
        fetch_ahead(pages + tile->ahead[key + r] * row_bytes + i * bytes);
        rows[r] = (lg_u32x16){};
        if (!whole && place < 0) continue;
#if HAS_PAIRS
        if (lane_elements == 4)
            rows[r] = (lg_u32x16)load_bytes(row, i, left);
        else if (pairs)
            rows[r] = (lg_u32x16)load_pairs(row, i, left);
        else
#endif
            rows[r] = (lg_u32x16)lg_kv_load(dtype, row, i, left);
    }
}

/* K of a tile, transposed: out[depth][TILE_KEYS]. Keys that are not to be read are zeros.
 * depth: head_dim, or in pairs half of it; whole: all keys are to be read. */
LG_INLINE void lg_pack_keys(int dtype, int pairs, int whole, const char *pages,
                            const lg_tile_rows *tile, int64_t head_dim, uint32_t *out) {
    lg_u32x16 rows[LG_LANES];
#if HAS_PAIRS
    if (pairs && dtype != LG_KV_BF16) { /* four elements a lane, then twice two */
        const byte_orders orders = make_byte_orders(dtype);
        const int64_t quads = (head_dim + 3) / 4;
        for (int64_t key = 0; key < TILE_KEYS; key += LG_LANES)
            for (int64_t d = 0; d < quads; d += LG_LANES) {
                load_keys(dtype, 1, whole, pages, tile, key, head_dim, d, 4, rows);
                lg_transpose(rows, (uint32_t *)rows, LG_LANES, LG_LANES);
                for (int64_t i = 0; i < LG_LANES && d + i < quads; i++) {
                    uint32_t *to = out + 2 * (d + i) * TILE_KEYS + key;
                    __m512i low, high;
                    widen_bytes(dtype, &orders, (__m512i)rows[i], &low, &high);
                    _mm512_storeu_si512(to, _mm512_permutex2var_epi8(low, orders.first, high));
                    if (4 * (d + i) + 2 < head_dim)
                        _mm512_storeu_si512(to + TILE_KEYS,
                                            _mm512_permutex2var_epi8(low, orders.second, high));
                }
            }
        return;
    }
#endif
    const int64_t depth = pairs ? head_dim / 2 : head_dim;
    for (int64_t key = 0; key < TILE_KEYS; key += LG_LANES)
        for (int64_t d = 0; d < depth; d += LG_LANES) {
            load_keys(dtype, pairs, whole, pages, tile, key, head_dim, d, 1 + pairs, rows);
            lg_transpose(rows, out + d * TILE_KEYS + key, TILE_KEYS, depth - d);
        }
}

#if HAS_PAIRS
/* V of two keys (NULL, if not `both`: zeros) as pairs in bf16: 64 lanes from d on; orders: of 8-bit
 * elements. */
LG_INLINE void load_two_values(int dtype, int both, const byte_orders *orders, const char *a_row,
                               const char *b_row, int64_t head_dim, int64_t d, lg_u32x16 *out) {
    const __mmask64 read_a = both || a_row != NULL ? ~0ull : 0;
    const __mmask64 read_b = both || b_row != NULL ? ~0ull : 0;
    if (dtype == LG_KV_BF16) {
        const lg_u16x32 low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int64_t i = d + 32 * half;
            const __mmask64 kept = bytes_within(2 * i, 2 * head_dim);
            const __m512i a = _mm512_maskz_loadu_epi8(kept & read_a, a_row + 2 * i);
            const __m512i b = _mm512_maskz_loadu_epi8(kept & read_b, b_row + 2 * i);
            out[2 * half] = (lg_u32x16)_mm512_permutex2var_epi16(a, (__m512i)low, b);
            out[2 * half + 1] = (lg_u32x16)_mm512_permutex2var_epi16(a, (__m512i)(low + 16), b);
        }
        return;
    }
    const __mmask64 kept = bytes_within(d, head_dim);
    const __m512i a = _mm512_maskz_loadu_epi8(kept & read_a, a_row + d);
    const __m512i b = _mm512_maskz_loadu_epi8(kept & read_b, b_row + d);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i low, high;
        widen_bytes(dtype, orders,
                    _mm512_permutex2var_epi8(a, half ? orders->odd : orders->even, b), &low, &high);
        out[2 * half] = (lg_u32x16)_mm512_permutex2var_epi8(low, orders->even, high);
        out[2 * half + 1] = (lg_u32x16)_mm512_permutex2var_epi8(low, orders->odd, high);
    }
}

LG_INLINE void pack_two_values(int dtype, const byte_orders *orders, const char *a_row,
                               const char *b_row, int64_t head_dim, int64_t width, uint32_t *out) {
    for (int64_t d = 0; d < width; d += 64) {
        lg_u32x16 columns[4];
        load_two_values(dtype, 0, orders, a_row, b_row, head_dim, d, columns);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (d + 16 * i < width) _mm512_storeu_si512(out + d + 16 * i, (__m512i)columns[i]);
    }
}
#endif

/* V of keys [begin, end) of a tile: out[keys][width] floats or out[keys / 2][width] pairs of
 * keys, padded with zeros to `width`, a multiple of 16. In pairs begin and end are even. */
LG_INLINE void lg_pack_values(int dtype, int pairs, const char *pages, const lg_tile_rows *tile,
                              int64_t begin, int64_t end, int64_t head_dim, int64_t width,
                              uint32_t *out) {
    const int64_t row_bytes = head_dim * lg_kv_bytes(dtype);
    const char *rows[2] = {};
#if HAS_PAIRS
    byte_orders orders;
    if (pairs && dtype != LG_KV_BF16) orders = make_byte_orders(dtype);
#endif
    for (int64_t key = begin; key < end; key++) {
        const int64_t place = tile->places[key];
        rows[key % 2] = place < 0 ? NULL : pages + place * row_bytes;
        for (int64_t line = 0; line < row_bytes; line += 64)
            fetch_ahead(pages + tile->ahead[key] * row_bytes + line);
#if HAS_PAIRS
        if (pairs && key % 2 == 0) continue;
        if (pairs) {
            pack_two_values(dtype, &orders, rows[0], rows[1], head_dim, width,
                            out + key / 2 * width);
            continue;
        }
#endif
        for (int64_t d = 0; d < width; d += LG_LANES) {
            lg_f32x16 v = {};
            if (place >= 0) v = lg_kv_load(dtype, rows[key % 2], d, head_dim - d);
            lg_store((float *)out + key * width + d, v);
        }
    }
}

/* c[rows][16 vectors] = (scale ? c * scale[row] : 0) + a[rows][depth] b[depth][16 vectors], each
 * sum in the order of depth. a and b hold floats or pairs. */
LG_INLINE void block_product(int rows, int vectors, int pairs, int64_t depth, const uint32_t *a,
                             int64_t a_stride, const uint32_t *b, int64_t b_stride,
                             const float *scale, float *c, int64_t c_stride) {
    enum { PARTS = LG_LANES / REGISTER_LANES, MOST = BLOCK_VECTORS * PARTS };
    const int count = vectors * PARTS;
    lg_register sums[BLOCK_ROWS][MOST];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++) {
            const float *from = c + r * c_stride + v * REGISTER_LANES;
            sums[r][v] = scale == NULL ? (lg_register){} : lg_load_register(from) * scale[r];
        }
    for (int64_t k = 0; k < depth; k++) {
        lg_register columns[MOST];
#pragma GCC unroll 8
        for (int v = 0; v < count; v++)
            columns[v] = lg_load_register((const float *)b + k * b_stride + v * REGISTER_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float element;
            memcpy(&element, a + r * a_stride + k, sizeof element);
            const lg_register left = lg_spread(element);
#pragma GCC unroll 8
            for (int v = 0; v < count; v++) {
#if HAS_PAIRS
                if (pairs)
                    sums[r][v] = (lg_f32x16)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)left,
                                                             (__m512bh)columns[v]);
                else
#endif
                    sums[r][v] = lg_fma(left, columns[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < count; v++)
            lg_store_register(c + r * c_stride + v * REGISTER_LANES, sums[r][v]);
}

#endif
