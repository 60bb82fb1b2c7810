/* gemm_float: linear layers with fp32, bf16 and fp16 weights; the layout is gemm.h's. */
#include "gemm.h"

#if defined(__AVX512BF16__)
#define BF16_LINE_STEPS 16 /* pairs of k in a line of prepared x */
#else
#define BF16_LINE_STEPS 8 /* x stays fp32 there */
#endif

/* To lines of 16 floats. */
static void prepare_f32(const lg_gemm *g, const void *kind, int64_t row, int rows, uint8_t *to) {
    (void)kind;
    for (int r = 0; r < rows; r++) {
        const float *x = g->x + (row + r) * g->x_stride;
        float *line = (float *)to + r * LG_LANES;
        for (int64_t k = 0; k < g->depth; k += LG_LANES, line += rows * LG_LANES)
            lg_store(line, lg_load_n(x + k, g->depth - k));
    }
}

#if defined(__AVX512BF16__)
/* To lines of 32 bf16. */
static void prepare_bf16(const lg_gemm *g, const void *kind, int64_t row, int rows, uint8_t *to) {
    (void)kind;
    for (int r = 0; r < rows; r++) {
        const float *x = g->x + (row + r) * g->x_stride;
        uint8_t *line = to + r * LG_LINE;
        for (int64_t k = 0; k < g->depth; k += 2 * LG_LANES, line += rows * LG_LINE) {
            const int64_t left = g->depth - k;
            lg_f32x16 low = lg_load_n(x + k, left), high = {};
            if (left > LG_LANES) high = lg_load_n(x + k + LG_LANES, left - LG_LANES);
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            memcpy(line, &both, sizeof both);
        }
    }
}
#else
#define prepare_bf16 prepare_f32
#endif

enum { F32, BF16, F16 };

/* So many k are summed up at a time, and those sums then: the error of one sum grows with its length,
 * and was three times that of torch's product at 2,240. Pairs of bf16 are half as many sums: longer runs
 * of them are 1 to 2 % quicker, and as exact. */
#define RUN_DEPTH 256
#define BF16_RUN_DEPTH 640

/* One word of k: acc[r] += x[r] * the panel's 32 outputs. */
LG_INLINE void step(int type, int rows, const uint8_t *a, const uint8_t *b,
                    lg_fvec acc[][LG_PARTS]) {
#if defined(__AVX512BF16__)
    if (type == BF16) {
        const __m512bh w0 = (__m512bh)lg_ivec_load(b), w1 = (__m512bh)lg_ivec_load(b + LG_LINE);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, a + r * LG_LINE, sizeof pair);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = (lg_fvec)_mm512_dpbf16_ps((__m512)acc[r][0], w0, x);
            acc[r][1] = (lg_fvec)_mm512_dpbf16_ps((__m512)acc[r][1], w1, x);
        }
        return;
    }
#endif
    lg_fvec w[LG_PARTS], odd[LG_PARTS];
#pragma GCC unroll 4
    for (int v = 0; v < LG_PARTS; v++) {
        if (type == BF16) {
            const lg_ivec pair = lg_ivec_load(b + v * LG_WIDTH * 4);
            w[v] = (lg_fvec)(pair << 16);
            odd[v] = (lg_fvec)(pair & (int32_t)0xffff0000);
        } else {
            w[v] = type == F32 ? lg_fvec_load((const float *)b + v * LG_WIDTH)
                               : lg_fvec_from_f16((const uint16_t *)b + v * LG_WIDTH);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        float x[2];
        memcpy(x, a + r * LG_LINE, type == BF16 ? 8 : 4);
#pragma GCC unroll 4
        for (int v = 0; v < LG_PARTS; v++) acc[r][v] += w[v] * x[0];
        if (type == BF16) {
#pragma GCC unroll 4
            for (int v = 0; v < LG_PARTS; v++) acc[r][v] += odd[v] * x[1];
        }
    }
}

LG_INLINE void multiply(int type, int rows, const lg_gemm *g, int64_t row, const uint8_t *a,
                        int64_t panel) {
    const int line_steps = type == BF16 ? BF16_LINE_STEPS : LG_LANES;
    const int step_bytes = LG_PANEL * (type == F16 ? 2 : 4), x_bytes = LG_LINE / line_steps;
    const int64_t steps = type == BF16 ? (g->depth + 1) / 2 : g->depth;
    const uint8_t *b = g->weight + panel * g->panel_bytes;
    const int64_t run_steps = type == BF16 ? BF16_RUN_DEPTH / 2 : RUN_DEPTH;
    lg_fvec sum[LG_TILE_ROWS][LG_PARTS];
    lg_gemm_begin(g, rows, row, panel, sum);
    for (int64_t run = 0; run < steps; run += run_steps) {
        const int64_t end = run + run_steps < steps ? run + run_steps : steps;
        lg_fvec acc[LG_TILE_ROWS][LG_PARTS] = {};
        for (int64_t s = run; s < end; s += line_steps, a += rows * LG_LINE) {
            if (end - s >= line_steps) {
                const uint8_t *x = a;
#pragma GCC unroll 2
                for (int j = 0; j < line_steps; j++, x += x_bytes, b += step_bytes)
                    step(type, rows, x, b, acc);
            } else {
                for (int j = 0; j < end - s; j++, b += step_bytes)
                    step(type, rows, a + j * x_bytes, b, acc);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < LG_PARTS; v++) sum[r][v] += acc[r][v];
    }
    lg_gemm_end(g, rows, row, panel, sum);
}

#if defined(__AVX512BF16__)
/* acc[r] = the first `rows` of a prepared tile of `tile_rows`, times `steps` words of two panels. */
LG_INLINE void multiply_run(int rows, int tile_rows, int64_t steps, const uint8_t *a,
                            const uint8_t *left, const uint8_t *right, lg_fvec acc[][4]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) acc[r][v] = (lg_fvec){};
    for (; steps > 0; steps -= BF16_LINE_STEPS, a += tile_rows * LG_LINE) {
        const uint8_t *end = a + 4 * (steps < BF16_LINE_STEPS ? steps : BF16_LINE_STEPS);
        for (const uint8_t *x = a; x < end; x += 4, left += LG_PANEL * 4, right += LG_PANEL * 4) {
            const lg_ivec w[4] = {lg_ivec_load(left), lg_ivec_load(left + LG_LINE),
                                  lg_ivec_load(right), lg_ivec_load(right + LG_LINE)};
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * LG_LINE, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++)
                    acc[r][v] = (lg_fvec)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)w[v], both);
            }
        }
    }
}

LG_INLINE void add_run(int rows, lg_fvec sums[][LG_TILE_ROWS][LG_PARTS], lg_fvec acc[][4]) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) sums[v / 2][r][v % 2] += acc[r][v];
}

/* `rows` of a tile times two panels, with the bits of `multiply`. */
LG_INLINE void multiply_wide(int rows, int tile_rows, const lg_gemm *g, int64_t row,
                             const uint8_t *a, int64_t panel) {
    const int64_t steps = (g->depth + 1) / 2, run_steps = BF16_RUN_DEPTH / 2;
    const uint8_t *left = g->weight + panel * g->panel_bytes, *right = left + g->panel_bytes;
    lg_fvec sums[2][LG_TILE_ROWS][LG_PARTS], acc[6][4];
    if (steps <= run_steps) { /* the sums are not in memory meanwhile */
        multiply_run(rows, tile_rows, steps, a, left, right, acc);
        for (int p = 0; p < 2; p++) lg_gemm_begin(g, rows, row, panel + p, sums[p]);
        add_run(rows, sums, acc);
    } else {
        for (int p = 0; p < 2; p++) lg_gemm_begin(g, rows, row, panel + p, sums[p]);
        for (int64_t run = 0; run < steps; run += run_steps) {
            const int64_t count = steps - run < run_steps ? steps - run : run_steps;
            multiply_run(rows, tile_rows, count, a + run / BF16_LINE_STEPS * tile_rows * LG_LINE,
                         left + run * LG_PANEL * 4, right + run * LG_PANEL * 4, acc);
            add_run(rows, sums, acc);
        }
    }
    for (int p = 0; p < 2; p++) lg_gemm_end(g, rows, row, panel + p, sums[p]);
}

/* Half a tile at a time, times two panels: as many accumulators as of a whole tile and one panel, and
 * 10 loads for each 24 products where there were 14. A prompt is 2 % quicker, and 4 % while the
 * processor saves power. */
static void multiply_two_bf16(const lg_gemm *g, const void *kind, int64_t row, int rows,
                              const uint8_t *a, int64_t panel) {
    (void)kind;
    for (int first = 0; first < rows; first += 6) {
        const uint8_t *from = a + first * LG_LINE;
        switch (rows - first) {
            case 1: multiply_wide(1, rows, g, row + first, from, panel); break;
            case 2: multiply_wide(2, rows, g, row + first, from, panel); break;
            case 3: multiply_wide(3, rows, g, row + first, from, panel); break;
            case 4: multiply_wide(4, rows, g, row + first, from, panel); break;
            case 5: multiply_wide(5, rows, g, row + first, from, panel); break;
            default: multiply_wide(6, rows, g, row + first, from, panel);
        }
    }
}
#else
#define multiply_two_bf16 NULL
#endif

#define CALL(R) multiply(TYPE, R, g, row, a, panel)
#define DEFINE(NAME)                                                                        \
    static void NAME(const lg_gemm *g, const void *kind, int64_t row, int rows,             \
                     const uint8_t *a, int64_t panel) {                                     \
        (void)kind;                                                                         \
        LG_ROWS_SWITCH(rows, CALL)                                                          \
    }
#define TYPE F32
DEFINE(multiply_f32)
#undef TYPE
#define TYPE BF16
DEFINE(multiply_bf16)
#undef TYPE
#define TYPE F16
DEFINE(multiply_f16)
#undef TYPE

/* Lines of `depth` elements of which `line` fit into one, in bytes. */
LG_INLINE int64_t lines(int64_t depth, int64_t line) { return (depth + line - 1) / line * LG_LINE; }

/* n and p of these three: see lg_gemm_of. */
LG_API void lg_linear_f32(const lg_op *op, lg_team *team) {
    lg_gemm g = lg_gemm_of(op);
    g.panel_bytes = g.depth * LG_PANEL * 4;
    g.row_bytes = lines(g.depth, LG_LANES);
    lg_gemm_run(&g, NULL, prepare_f32, multiply_f32, team);
}

LG_API void lg_linear_bf16(const lg_op *op, lg_team *team) {
    lg_gemm g = lg_gemm_of(op);
    g.panel_bytes = (g.depth + 1) / 2 * LG_PANEL * 4;
    g.row_bytes = lines(g.depth, BF16_LINE_STEPS * 2);
    g.multiply_two = multiply_two_bf16;
    lg_gemm_run(&g, NULL, prepare_bf16, multiply_bf16, team);
}

LG_API void lg_linear_f16(const lg_op *op, lg_team *team) {
    lg_gemm g = lg_gemm_of(op);
    g.panel_bytes = g.depth * LG_PANEL * 2;
    g.row_bytes = lines(g.depth, LG_LANES);
    lg_gemm_run(&g, NULL, prepare_f32, multiply_f16, team);
}
