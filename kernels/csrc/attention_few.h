/* attention_few: products of so few query rows that keys and values are better multiplied as they are
 * loaded than packed first. Sums are in the order of block_product's, so that bits are the same. */
#ifndef LEGATO_ATTENTION_FEW_H
#define LEGATO_ATTENTION_FEW_H

#include "attention_tile.h"

#if HAS_PAIRS

#define MOST_ROW_BYTES 1024 /* of one key */

/* Where the keys of a tile lie (zeros for those that are not to be read), and those to be fetched. */
typedef struct {
    const char *k[TILE_KEYS], *v[TILE_KEYS];
    const char *k_ahead[TILE_KEYS], *v_ahead[TILE_KEYS];
} few_rows;

static const char zero_row[MOST_ROW_BYTES] __attribute__((aligned(64)));

/* K and V of the tile's keys, whose rows are of `row_bytes`. */
LG_INLINE void place_few(const char *k, const char *v, int64_t row_bytes, const lg_tile_rows *tile,
                         few_rows *rows) {
    const __m512i bytes = _mm512_set1_epi64(row_bytes), zeros = _mm512_set1_epi64((int64_t)zero_row);
    const __m512i all_k = _mm512_set1_epi64((int64_t)k), all_v = _mm512_set1_epi64((int64_t)v);
    for (int64_t i = 0; i < TILE_KEYS; i += 8) {
        const __m512i place = _mm512_loadu_si512(tile->places + i);
        const __m512i ahead = _mm512_loadu_si512(tile->ahead + i);
        const __mmask8 none = _mm512_movepi64_mask(place);
        const __m512i here = _mm512_mullo_epi64(place, bytes);
        const __m512i there = _mm512_mullo_epi64(ahead, bytes);
        _mm512_storeu_si512(rows->k + i, _mm512_mask_mov_epi64(here + all_k, none, zeros));
        _mm512_storeu_si512(rows->v + i, _mm512_mask_mov_epi64(here + all_v, none, zeros));
        _mm512_storeu_si512(rows->k_ahead + i, there + all_k);
        _mm512_storeu_si512(rows->v_ahead + i, there + all_v);
    }
}

LG_INLINE lg_f32x16 add_pairs(lg_f32x16 sum, uint32_t pair, lg_u32x16 pairs) {
    return (lg_f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair),
                                       (__m512bh)pairs);
}

/* scores[rows][TILE_KEYS] of the first `keys` keys of a tile (up to a multiple of 16), as a product
 * with lg_pack_keys' output. */
LG_INLINE void few_scores(int dtype, int rows, const few_rows *tile, int64_t keys,
                          int64_t head_dim, const uint32_t *q, float *scores) {
    const int words = dtype == LG_KV_BF16 ? 1 : 2; /* that a lane becomes */
    const int64_t depth = head_dim / 2, lanes = (depth + words - 1) / words;
    byte_orders orders;
    if (words == 2) orders = make_byte_orders(dtype);
    for (int64_t key = 0; key < keys; key += LG_LANES) {
        lg_f32x16 sums[BLOCK_ROWS] = {};
        for (int64_t d = 0; d < lanes; d += LG_LANES) {
            lg_u32x16 columns[LG_LANES];
            const __mmask64 kept = bytes_within(4 * d, head_dim * lg_kv_bytes(dtype));
#pragma GCC unroll 16
            for (int r = 0; r < LG_LANES; r++) {
                fetch_ahead(tile->k_ahead[key + r] + 4 * d);
                columns[r] = (lg_u32x16)_mm512_maskz_loadu_epi8(kept, tile->k[key + r] + 4 * d);
            }
            lg_transpose(columns, (uint32_t *)columns, LG_LANES, LG_LANES);
#pragma GCC unroll 16
            for (int i = 0; i < LG_LANES; i++) {
                const uint32_t *element = q + words * (d + i);
                if (d + i >= lanes) break;
                if (words == 1) {
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++)
                        sums[r] = add_pairs(sums[r], element[r * depth], columns[i]);
                    continue;
                }
                __m512i low, high;
                widen_bytes(dtype, &orders, (__m512i)columns[i], &low, &high);
                const __m512i first = _mm512_permutex2var_epi8(low, orders.first, high);
                const __m512i second = _mm512_permutex2var_epi8(low, orders.second, high);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r] = add_pairs(sums[r], element[r * depth], (lg_u32x16)first);
                if (2 * (d + i) + 1 >= depth) break;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    sums[r] = add_pairs(sums[r], element[r * depth + 1], (lg_u32x16)second);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) lg_store(scores + r * TILE_KEYS + key, sums[r]);
    }
}

/* sum[rows][width] = sum * decay + weights[rows][TILE_KEYS] V of the keys [begin, end), of which the
 * first is even: weights number i are those of keys 2 i and 2 i + 1. */
LG_INLINE void few_values(int dtype, int rows, const few_rows *tile, int64_t begin, int64_t end,
                          int64_t head_dim, int64_t width, const uint32_t *weights,
                          const float *decay, float *sum) {
    const int64_t bytes = lg_kv_bytes(dtype);
    enum { VECTORS = 4 };
    byte_orders orders;
    if (dtype != LG_KV_BF16) orders = make_byte_orders(dtype);
    for (int64_t d = 0; d < width; d += VECTORS * LG_LANES) {
        lg_f32x16 sums[BLOCK_ROWS][VECTORS] = {};
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                if (d + v * LG_LANES < width)
                    sums[r][v] = lg_load(sum + r * width + d + v * LG_LANES) * decay[r];
        for (int64_t key = begin; key < end; key += 2) {
            lg_u32x16 columns[VECTORS];
            for (int64_t line = 0; line < VECTORS * LG_LANES * bytes; line += 64) {
                fetch_ahead(tile->v_ahead[key] + d * bytes + line);
                fetch_ahead(tile->v_ahead[key + 1] + d * bytes + line);
            }
            load_two_values(dtype, 1, &orders, tile->v[key], tile->v[key + 1], head_dim, d, columns);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = add_pairs(sums[r][v], weights[r * TILE_KEYS + key / 2], columns[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                if (d + v * LG_LANES < width)
                    lg_store(sum + r * width + d + v * LG_LANES, sums[r][v]);
    }
}

#define FEW_ROWS(CALL, DTYPE) \
    CALL(DTYPE, 2) CALL(DTYPE, 3) CALL(DTYPE, 4) CALL(DTYPE, 5) CALL(DTYPE, 6)
#define FEW_CASES(CALL) \
    FEW_ROWS(CALL, LG_KV_BF16) FEW_ROWS(CALL, LG_KV_INT8) FEW_ROWS(CALL, LG_KV_FP8)

#endif
#endif
