/* gemm: out = x @ weight.T for packed weights: the bytes of a weight, and the work shared out.
 *
 * A weight [N, K] lies in panels of 32 outputs (N padded with zeros), k outermost in a panel:
 *     f32   uint32 [N / 32][K][32]            one k a word
 *     bf16  uint32 [N / 32][ceil(K / 2)][32]  two, the even k in the low half; K padded with a 0
 *     q8    uint32 [N / 32][K / 4][32]        four unsigned bytes
 *     q4    uint32 [N / 32][K / 8][32]        eight nibbles, the lowest k in the lowest four bits
 *     f16   uint16 [N / 32][K][32]
 * so a panel is read front to back once, whatever the number of rows. Scales and offsets of
 * quantised weights are [N / 32][groups][32].
 *
 * A gated weight is two matrices [N / 2, K], gate and up: each of its panels holds 16 outputs of the
 * gate and then the same 16 of up (both padded), so that an MLP's activation(gate) * up is made of
 * one panel's sums, and only that is written: out is [rows, N / 2].
 *
 * Rows of x go in tiles of at most LG_TILE_ROWS. A tile is first brought into the form that the
 * multiplication reads ("prepared"): lines of 64 bytes, [K / (k a line)][rows][64], so that one
 * pointer and constant distances reach every row. Each output is summed over k in runs of one fixed
 * length: its bits do not depend on the number of rows, the place in a tile or the threads.
 */
#ifndef LEGATO_GEMM_H
#define LEGATO_GEMM_H

#include "op.h"
#include "vec.h"

#define LG_PANEL 32
#define LG_GATED 16 /* outputs of a gated panel */
#define LG_LINE 64

/* The accumulators of a tile, LG_TILE_ROWS x 32 floats, must fit into the registers. */
#if defined(__AVX512F__)
#define LG_WIDTH 16
#define LG_TILE_ROWS 12
#else
#define LG_WIDTH 8
#define LG_TILE_ROWS 3
#endif
#define LG_PARTS (LG_PANEL / LG_WIDTH)

typedef float lg_fvec __attribute__((vector_size(LG_WIDTH * 4)));
typedef int32_t lg_ivec __attribute__((vector_size(LG_WIDTH * 4)));

LG_INLINE lg_fvec lg_fvec_load(const float *p) {
    lg_fvec v;
    memcpy(&v, p, sizeof v);
    return v;
}

LG_INLINE lg_ivec lg_ivec_load(const void *p) {
    lg_ivec v;
    memcpy(&v, p, sizeof v);
    return v;
}

LG_INLINE lg_fvec lg_fvec_load_n(const float *p, int64_t n) {
    if (n >= LG_WIDTH) return lg_fvec_load(p);
    lg_fvec v = {};
    if (n > 0) memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
}

LG_INLINE void lg_fvec_store_n(float *p, lg_fvec v, int64_t n) {
    if (n >= LG_WIDTH)
        memcpy(p, &v, sizeof v);
    else if (n > 0)
        memcpy(p, &v, (size_t)n * sizeof(float));
}

LG_INLINE lg_fvec lg_fvec_from_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    return lg_f16_load(p);
#elif defined(__F16C__)
    return (lg_fvec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    lg_fvec v;
    for (int i = 0; i < LG_WIDTH; i++) {
        _Float16 half;
        memcpy(&half, p + i, sizeof half);
        v[i] = (float)half;
    }
    return v;
#endif
}

/* What becomes of a sum: it is written, added to `out`, or of a gated weight and activated. */
enum { LG_WRITE, LG_ADD, LG_SILU_MUL, LG_GELU_MUL };

typedef struct lg_gemm lg_gemm;

/* Prepared rows [row, row + rows) times one panel. */
typedef void (*lg_gemm_multiply)(const lg_gemm *g, const void *kind, int64_t row, int rows,
                                 const uint8_t *prepared, int64_t panel);

struct lg_gemm {
    int64_t rows, outputs, depth; /* M, N, K */
    int64_t x_stride, out_stride;
    int finish; /* LG_WRITE and so on */
    const float *x;
    const uint8_t *weight;
    const float *bias; /* [N] or NULL */
    float *out;
    int64_t panel_bytes;
    int64_t row_bytes; /* of a prepared row; a multiple of LG_LINE */
    lg_gemm_multiply multiply_two; /* times that panel and the next one; NULL: there is none */
};

/* The slots that every kind shares. n: rows, outputs, depth, stride of x, stride of out, finish;
 * p: x, weight, bias or NULL, out. */
LG_INLINE lg_gemm lg_gemm_of(const lg_op *op) {
    return (lg_gemm){.rows = op->n[0],
                     .outputs = op->n[1],
                     .depth = op->n[2],
                     .x_stride = op->n[3],
                     .out_stride = op->n[4],
                     .finish = (int)op->n[5],
                     .x = op->p[0],
                     .weight = op->p[1],
                     .bias = op->p[2],
                     .out = op->p[3]};
}

LG_INLINE int lg_gemm_is_gated(const lg_gemm *g) { return g->finish >= LG_SILU_MUL; }

/* A tile's accumulators before the first k: bias, and what is in `out` where it is added to. */
LG_INLINE void lg_gemm_begin(const lg_gemm *g, int rows, int64_t row, int64_t panel,
                             lg_fvec acc[][LG_PARTS]) {
    for (int v = 0; v < LG_PARTS; v++) {
        int64_t column = panel * LG_PANEL + v * LG_WIDTH, left = g->outputs - column;
        if (lg_gemm_is_gated(g)) {
            const int64_t half = g->outputs / 2;
            column = panel * LG_GATED + v * LG_WIDTH % LG_GATED;
            left = half - column;
            if (v * LG_WIDTH >= LG_GATED) column += half;
        }
        lg_fvec start = {};
        if (g->bias != NULL) start = lg_fvec_load_n(g->bias + column, left);
        for (int r = 0; r < rows; r++) {
            acc[r][v] = start;
            if (g->finish == LG_ADD)
                acc[r][v] += lg_fvec_load_n(g->out + (row + r) * g->out_stride + column, left);
        }
    }
}

/* Writes activation(gate) * up of a gated panel's sums. */
void lg_gemm_end_gated(const lg_gemm *g, int rows, int64_t row, int64_t panel,
                       lg_fvec sums[][LG_PARTS]);

LG_INLINE void lg_gemm_end(const lg_gemm *g, int rows, int64_t row, int64_t panel,
                           lg_fvec acc[][LG_PARTS]) {
    if (lg_gemm_is_gated(g)) {
        /* A copy: what a call gets the address of cannot be in registers before it either. */
        lg_fvec sums[LG_TILE_ROWS][LG_PARTS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < LG_PARTS; v++) sums[r][v] = acc[r][v];
        lg_gemm_end_gated(g, rows, row, panel, sums);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < LG_PARTS; v++) {
            const int64_t column = panel * LG_PANEL + v * LG_WIDTH;
            lg_fvec_store_n(g->out + (row + r) * g->out_stride + column, acc[r][v],
                            g->outputs - column);
        }
}

/* Brings rows [row, row + rows) of x into the form that `multiply` reads. */
typedef void (*lg_gemm_prepare)(const lg_gemm *g, const void *kind, int64_t row, int rows,
                                uint8_t *to);

/* Prepares all tiles and multiplies them with all panels, on the whole team. */
void lg_gemm_run(const lg_gemm *g, const void *kind, lg_gemm_prepare prepare,
                 lg_gemm_multiply multiply, lg_team *team);

/* Calls FN(constant number of rows). */
#if LG_TILE_ROWS == 12
#define LG_ROWS_SWITCH(rows, FN) \
    switch (rows) {              \
        case 1: FN(1); break;    \
        case 2: FN(2); break;    \
        case 3: FN(3); break;    \
        case 4: FN(4); break;    \
        case 5: FN(5); break;    \
        case 6: FN(6); break;    \
        case 7: FN(7); break;    \
        case 8: FN(8); break;    \
        case 9: FN(9); break;    \
        case 10: FN(10); break;  \
        case 11: FN(11); break;  \
        default: FN(12); break;  \
    }
#else
#define LG_ROWS_SWITCH(rows, FN) \
    switch (rows) {              \
        case 1: FN(1); break;    \
        case 2: FN(2); break;    \
        default: FN(3); break;   \
    }
#endif

#endif
