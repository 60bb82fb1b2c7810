/* gemm_quant: linear layers with 8- and 4-bit weights; the layout is gemm.h's.
 *
 * x is rounded to 8 signed bits with one scale for each row and "activation group": the largest
 * divisor of the weight's group among 128, 64, 32, 16, 8, or 128 where the whole row is one group.
 * Then out = sum over activation groups of x_scale * (w_scale * dot + w_offset * sum of the group's
 * x), where dot is of whole numbers and exact. With one zero point for the whole weight the dot
 * starts at -zero * sum instead, which costs nothing.
 */
#include "gemm.h"

#define PREFETCH_BYTES 2048

enum { SCALES_F32 = 0, SCALES_F16 = 2 };
enum { OFFSETS_NONE, OFFSETS_ZERO_POINTS, OFFSETS_F16, OFFSETS_F32 };

typedef struct {
    int64_t group, activation_group;
    int64_t groups, activation_groups; /* their numbers */
    int64_t scale_type, offset_type;
    int32_t zero;
    const uint8_t *scales, *offsets; /* [panels][groups][32] */
    int64_t value_bytes; /* of a prepared row, before its scales and sums */
} quantization;

typedef int8_t i8x16 __attribute__((vector_size(16)));

/* The largest magnitude of a group; infinity or a NaN where it holds one. */
LG_INLINE float magnitude(const float *x, int64_t n) {
    /* As whole numbers, magnitudes are in the same order, and a NaN is the largest. */
    int32_t best = 0;
#if defined(__AVX512F__)
    __m512i lanes = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += LG_LANES) {
        const lg_i32x16 bits = (lg_i32x16)lg_load_n(x + i, n - i) & 0x7fffffff;
        lanes = _mm512_max_epi32(lanes, (__m512i)bits);
    }
    best = _mm512_reduce_max_epi32(lanes);
#else
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        best = bits > best ? bits : best;
    }
#endif
    float result;
    memcpy(&result, &best, sizeof result);
    return result;
}

/* 1.5 * 2^23: x + MAGIC rounds x to a whole number, and its lowest bits are that number's. */
#define MAGIC 12582912.0f
#define MAGIC_BITS 0x4b400000u

/* Sixteen values, in the order in which a weight's word holds them: for q4 the even k of eight,
 * which are in the low nibbles of its four bytes, then the odd ones. */
LG_INLINE i8x16 round_to_bytes(int bits, lg_f32x16 v, lg_u32x16 *sum) {
    const lg_u32x16 whole = (lg_u32x16)(v + MAGIC);
    *sum += whole - MAGIC_BITS;
#if defined(__AVX512F__)
    /* (gcc 12 makes single bytes of a __builtin_convertvector to them.) */
    const i8x16 bytes = (i8x16)_mm512_cvtepi32_epi8((__m512i)whole);
#else
    const i8x16 bytes = __builtin_convertvector(whole, i8x16);
#endif
    if (bits == 8) return bytes;
    return __builtin_shuffle(bytes, (i8x16){0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
}

LG_INLINE uint32_t total(lg_u32x16 v) {
#if defined(__AVX512F__)
    return (uint32_t)_mm512_reduce_add_epi32((__m512i)v);
#else
    uint32_t x[LG_LANES], sum = 0;
    memcpy(x, &v, sizeof v);
    for (int i = 0; i < LG_LANES; i++) sum += x[i];
    return sum;
#endif
}

/* To lines of 64 bytes [depth / 64][rows][64]; then the scales [activation groups][rows] fp32, then
 * alike -zero * sum as int32, or scale * sum as fp32 where the weight has offsets. */
LG_INLINE void prepare(int bits, const lg_gemm *g, const quantization *q, int64_t row, int rows,
                       uint8_t *to) {
    float *scales = (float *)(to + rows * q->value_bytes);
    float *sums = scales + q->activation_groups * rows;
    for (int r = 0; r < rows; r++) {
        const float *x = g->x + (row + r) * g->x_stride;
        for (int64_t group = 0; group < q->activation_groups; group++) {
            const int64_t first = group * q->activation_group;
            const int64_t last = first + q->activation_group < g->depth
                                     ? first + q->activation_group : g->depth;
            const float most = magnitude(x + first, last - first);
            /* Less than this has no inverse, and is nothing beside any other sum. */
            const int empty = most < 1e-30f;
            const float scale = empty ? 0.0f : most < INFINITY ? most / 127.0f : NAN;
            const float inverse = empty ? 0.0f : 127.0f / most;
            lg_u32x16 sum = {};
            for (int64_t k = first; k < last; k += LG_LANES) {
                i8x16 bytes = round_to_bytes(bits, lg_load_n(x + k, last - k) * inverse, &sum);
                uint8_t *place = to + k / LG_LINE * rows * LG_LINE + r * LG_LINE + k % LG_LINE;
                memcpy(place, &bytes, last - k < LG_LANES ? 8 : 16);
            }
            scales[group * rows + r] = scale;
            const uint32_t whole = total(sum), start = 0u - (uint32_t)q->zero * whole;
            if (q->offset_type == OFFSETS_NONE)
                memcpy(sums + group * rows + r, &start, sizeof start);
            else
                sums[group * rows + r] = scale * (float)(int32_t)whole;
        }
    }
}

/* acc += dot products of four unsigned bytes of w and four signed ones of x, lane by lane. */
LG_INLINE lg_ivec dot(lg_ivec acc, lg_ivec w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (lg_ivec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32(x);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8);
    const __m512i odd = _mm512_srai_epi16(all, 8);
    const __m512i low = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255));
    const __m512i high = _mm512_srli_epi16((__m512i)w, 8);
    return acc + (lg_ivec)_mm512_madd_epi16(low, even) + (lg_ivec)_mm512_madd_epi16(high, odd);
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32(x);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
    const __m256i odd = _mm256_srai_epi16(all, 8);
    const __m256i low = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255));
    const __m256i high = _mm256_srli_epi16((__m256i)w, 8);
    return acc + (lg_ivec)_mm256_madd_epi16(low, even) + (lg_ivec)_mm256_madd_epi16(high, odd);
#else
    for (int i = 0; i < 4; i++) acc += (w >> 8 * i & 255) * (int32_t)(int8_t)(x >> 8 * i);
    return acc;
#endif
}

/* One word of k: acc[r] += x[r] * the panel's 32 outputs. */
LG_INLINE void step(int bits, int rows, const uint8_t *a, const uint8_t *b,
                    lg_ivec acc[][LG_PARTS]) {
    lg_ivec low[LG_PARTS], high[LG_PARTS];
#pragma GCC unroll 4
    for (int v = 0; v < LG_PARTS; v++) {
        low[v] = lg_ivec_load(b + v * LG_WIDTH * 4);
        /* With few rows the hardware's prefetchers are better, and with 8 bits always. */
        if (bits == 4 && rows >= 4) __builtin_prefetch(b + v * LG_WIDTH * 4 + PREFETCH_BYTES);
        if (bits == 4) {
            high[v] = low[v] >> 4 & 0x0f0f0f0f;
            low[v] &= 0x0f0f0f0f;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        int32_t x[2];
        memcpy(x, a + r * LG_LINE, bits == 4 ? 8 : 4);
#pragma GCC unroll 4
        for (int v = 0; v < LG_PARTS; v++) acc[r][v] = dot(acc[r][v], low[v], x[0]);
        if (bits == 4) {
#pragma GCC unroll 4
            for (int v = 0; v < LG_PARTS; v++) acc[r][v] = dot(acc[r][v], high[v], x[1]);
        }
    }
}

LG_INLINE lg_fvec load_float(const uint8_t *p, int64_t at, int is_half) {
    return is_half ? lg_fvec_from_f16((const uint16_t *)p + at) : lg_fvec_load((const float *)p + at);
}

LG_INLINE lg_fvec load_offset(const quantization *q, int64_t at, lg_fvec scale) {
    if (q->offset_type != OFFSETS_ZERO_POINTS)
        return load_float(q->offsets, at, q->offset_type == OFFSETS_F16);
#if defined(__AVX512F__)
    const __m128i zeros = _mm_loadu_si128((const __m128i *)(q->offsets + at));
    return -scale * (lg_fvec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros));
#else
    lg_fvec zeros;
    for (int i = 0; i < LG_WIDTH; i++) zeros[i] = (float)q->offsets[at + i];
    return -scale * zeros;
#endif
}

LG_INLINE void multiply(int bits, int rows, const lg_gemm *g, const quantization *q, int64_t row,
                        const uint8_t *a, int64_t panel) {
    const int step_k = 32 / bits;
    const uint8_t *b = g->weight + panel * g->panel_bytes;
    const float *x_scales = (const float *)(a + rows * q->value_bytes);
    const float *x_sums = x_scales + q->activation_groups * rows;
    lg_fvec out[LG_TILE_ROWS][LG_PARTS];
    lg_gemm_begin(g, rows, row, panel, out);
    for (int64_t group = 0; group < q->activation_groups; group++) {
        const int64_t first = group * q->activation_group;
        const int64_t last =
            first + q->activation_group < g->depth ? first + q->activation_group : g->depth;
        lg_ivec acc[LG_TILE_ROWS][LG_PARTS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t start = 0;
            if (q->offset_type == OFFSETS_NONE)
                memcpy(&start, x_sums + group * rows + r, sizeof start);
#pragma GCC unroll 4
            for (int v = 0; v < LG_PARTS; v++) acc[r][v] = (lg_ivec){} + start;
        }
        for (int64_t k = first; k < last;) {
            const int64_t place = k % LG_LINE;
            const uint8_t *x = a + k / LG_LINE * rows * LG_LINE + place;
            const int64_t count = last - k < LG_LINE - place ? last - k : LG_LINE - place;
#pragma GCC unroll 2
            for (int64_t i = 0; i < count; i += step_k, x += step_k, b += LG_PANEL * 4)
                step(bits, rows, x, b, acc);
            k += count;
        }
        const int64_t at = (panel * q->groups + first / q->group) * LG_PANEL;
#pragma GCC unroll 4
        for (int v = 0; v < LG_PARTS; v++) {
            const lg_fvec scale =
                load_float(q->scales, at + v * LG_WIDTH, q->scale_type == SCALES_F16);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                out[r][v] += __builtin_convertvector(acc[r][v], lg_fvec) * scale *
                             x_scales[group * rows + r];
            if (q->offset_type == OFFSETS_NONE) continue;
            const lg_fvec offset = load_offset(q, at + v * LG_WIDTH, scale);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) out[r][v] += offset * x_sums[group * rows + r];
        }
    }
    lg_gemm_end(g, rows, row, panel, out);
}

#define CALL(R) multiply(BITS, R, g, kind, row, a, panel)
#define DEFINE(PREPARE, MULTIPLY)                                                         \
    static void PREPARE(const lg_gemm *g, const void *kind, int64_t row, int rows,        \
                        uint8_t *to) {                                                    \
        prepare(BITS, g, kind, row, rows, to);                                            \
    }                                                                                     \
    static void MULTIPLY(const lg_gemm *g, const void *kind, int64_t row, int rows,       \
                         const uint8_t *a, int64_t panel) {                               \
        LG_ROWS_SWITCH(rows, CALL)                                                        \
    }
#define BITS 8
DEFINE(prepare_q8, multiply_q8)
#undef BITS
#define BITS 4
DEFINE(prepare_q4, multiply_q4)
#undef BITS

/* n: as lg_gemm_of says, then from 6 on: group, activation group, type of scales (0 fp32, 2 fp16),
 * type of offsets (0 none, 1 uint8 zero points, 2 fp16, 3 fp32), zero point (where none);
 * p: as lg_gemm_of says, then scales, offsets or NULL. depth is a multiple of 8, both groups are;
 * the activation group divides 64 or is 128. */
LG_INLINE void run(int bits, const lg_op *op, lg_team *team) {
    lg_gemm g = lg_gemm_of(op);
    quantization q = {.group = op->n[6],
                      .activation_group = op->n[7],
                      .groups = (g.depth + op->n[6] - 1) / op->n[6],
                      .activation_groups = (g.depth + op->n[7] - 1) / op->n[7],
                      .scale_type = op->n[8],
                      .offset_type = op->n[9],
                      .zero = (int32_t)op->n[10],
                      .scales = op->p[4],
                      .offsets = op->p[5],
                      .value_bytes = (g.depth + LG_LINE - 1) / LG_LINE * LG_LINE};
    g.panel_bytes = g.depth * bits / 8 * LG_PANEL;
    g.row_bytes = q.value_bytes + (q.activation_groups * 8 + LG_LINE - 1) / LG_LINE * LG_LINE;
    lg_gemm_run(&g, &q, bits == 8 ? prepare_q8 : prepare_q4, bits == 8 ? multiply_q8 : multiply_q4,
                team);
}

LG_API void lg_linear_q8(const lg_op *op, lg_team *team) { run(8, op, team); }
LG_API void lg_linear_q4(const lg_op *op, lg_team *team) { run(4, op, team); }
