/* quantize: float weights to 8 bits a row, or 4 bits a group with the least squared error. */
#include "op.h"
#include "vec.h"

enum { MAX_VECTORS = 8 }; /* groups of up to 128 */

/* Below this range a group counts as constant: 1 / scale must stay finite. */
static const float TINY = 1e-30f;
/* First guesses, each improved REFINEMENTS times. Shares of the range that 0 to 15 span, and what
 * the largest weight of a symmetric group is a multiple of: minus this. */
static const float RANGE_SHARES[] = {1.0f, 0.9f, 0.8f, 0.7f};
static const float EXTREME_LEVELS[] = {8.0f, 7.0f, 9.0f, 10.0f};
enum { GUESSES = 4, REFINEMENTS = 2 };

LG_INLINE lg_f32x16 nearest(lg_f32x16 x) {
    const lg_f32x16 magic = lg_splat(12582912.0f); /* 1.5 * 2^23: adding it rounds, ties to even */
    return x + magic - magic;
}

LG_INLINE lg_f32x16 levels(lg_f32x16 x, float inverse, float offset) {
    lg_f32x16 q = lg_min(lg_max((x - offset) * inverse, lg_splat(0.0f)), lg_splat(15.0f));
    return nearest(q);
}

typedef uint8_t u8x16 __attribute__((vector_size(16)));

LG_INLINE void store_bytes(uint8_t *out, lg_f32x16 whole) {
    u8x16 bytes = __builtin_convertvector(__builtin_convertvector(whole, lg_i32x16), u8x16);
    memcpy(out, &bytes, sizeof bytes);
}

typedef struct {
    lg_f32x16 x[MAX_VECTORS]; /* the lanes past `size` hold 0 */
    lg_f32x16 mask[MAX_VECTORS]; /* 1 or 0 */
    int vectors;
    float size;
} group;

LG_INLINE group load_group(const float *weight, int64_t size) {
    group g = {.vectors = (int)((size + LG_LANES - 1) / LG_LANES), .size = (float)size};
    const lg_f32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < g.vectors; i++) {
        g.x[i] = lg_load_n(weight + i * LG_LANES, size - i * LG_LANES);
        lg_i32x16 inside = lane + (float)(i * LG_LANES) < (float)size;
        g.mask[i] = (lg_f32x16)((lg_i32x16)lg_splat(1.0f) & inside);
    }
    return g;
}

/* w = scale * q + offset: for given q the best scale and offset are a line's fit. */
LG_INLINE void fit_affine(const group *g, float *scale, float *offset) {
    lg_f32x16 low = lg_splat(INFINITY), high = lg_splat(-INFINITY), total = {};
    for (int i = 0; i < g->vectors; i++) {
        lg_i32x16 outside = g->mask[i] == 0.0f;
        lg_i32x16 x = (lg_i32x16)g->x[i] & ~outside;
        low = lg_min(low, (lg_f32x16)(x | ((lg_i32x16)lg_splat(INFINITY) & outside)));
        high = lg_max(high, (lg_f32x16)(x | ((lg_i32x16)lg_splat(-INFINITY) & outside)));
        total += g->x[i];
    }
    const float minimum = -lg_max_lane(-low), maximum = lg_max_lane(high);
    const float mean = lg_sum(total) / g->size;
    const float middle = 0.5f * minimum + 0.5f * maximum, half = 0.5f * maximum - 0.5f * minimum;
    float best = -1.0f;
    *scale = 0.0f;
    *offset = middle;
    if (!(half > TINY)) return;
    for (int guess = 0; guess < GUESSES; guess++) {
        float s = half * RANGE_SHARES[guess] * (2.0f / 15.0f);
        float o = middle - half * RANGE_SHARES[guess];
        float gain = -1.0f; /* how much of the group's variance the line explains */
        for (int round = 0; round < REFINEMENTS; round++) {
            lg_f32x16 sum_q = {}, sum_qq = {}, sum_qx = {};
            for (int i = 0; i < g->vectors; i++) {
                lg_f32x16 q = levels(g->x[i], 1.0f / s, o) * g->mask[i];
                sum_q += q;
                sum_qq += q * q;
                sum_qx += q * (g->x[i] - mean);
            }
            const float q_mean = lg_sum(sum_q) / g->size;
            const float variance = lg_sum(sum_qq) - g->size * q_mean * q_mean;
            const float covariance = lg_sum(sum_qx);
            if (!(variance > 0.5f)) break; /* all weights on one level */
            s = covariance / variance;
            o = mean - s * q_mean;
            gain = s * covariance;
            if (!(s > TINY)) break;
        }
        if (gain > best && s > TINY) {
            best = gain;
            *scale = s;
            *offset = o;
        }
    }
}

/* w = scale * (q - 8); the scale may be negative, so that the extreme weight can take level -8. */
LG_INLINE void fit_symmetric(const group *g, float *scale, float *offset) {
    lg_f32x16 low = {}, high = {};
    for (int i = 0; i < g->vectors; i++) {
        low = lg_min(low, g->x[i]);
        high = lg_max(high, g->x[i]);
    }
    const float minimum = -lg_max_lane(-low), maximum = lg_max_lane(high);
    const float extreme = maximum > -minimum ? maximum : minimum;
    float best = -1.0f;
    *scale = 0.0f;
    if (fabsf(extreme) > TINY) {
        for (int guess = 0; guess < GUESSES; guess++) {
            float s = extreme / -EXTREME_LEVELS[guess], gain = -1.0f;
            for (int round = 0; round < REFINEMENTS; round++) {
                lg_f32x16 sum_qq = {}, sum_qx = {};
                for (int i = 0; i < g->vectors; i++) {
                    lg_f32x16 q = levels(g->x[i], 1.0f / s, -8.0f * s) - 8.0f;
                    q *= g->mask[i];
                    sum_qq += q * q;
                    sum_qx += q * g->x[i];
                }
                const float squares = lg_sum(sum_qq), product = lg_sum(sum_qx);
                s = product / squares; /* the extreme weight is never on level 0 */
                gain = s * product;
            }
            if (gain > best) {
                best = gain;
                *scale = s;
            }
        }
    }
    *offset = -8.0f * *scale;
}

/* To fp16, which takes half the memory, where that moves x by no more than `allowed`. */
LG_INLINE float to_half(float x, float allowed) {
    const float half = (float)(_Float16)x;
    return fabsf(half - x) <= fmaxf(allowed, fabsf(x) * 0x1p-11f) ? half : x;
}

/* n: rows, width (a multiple of 8), group size (at most 128), symmetric;
 * p: weight fp32, values [rows, width / 2], scales [rows, groups], offsets. */
LG_API void lg_quantize_4bit(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1], group_size = op->n[2], symmetric = op->n[3];
    const int64_t groups = (width + group_size - 1) / group_size;
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float *weight = (const float *)op->p[0] + row * width;
        uint8_t *values = (uint8_t *)op->p[1] + row * (width / 2);
        for (int64_t j = 0; j < groups; j++) {
            const int64_t first = j * group_size;
            const int64_t size = width - first < group_size ? width - first : group_size;
            const group g = load_group(weight + first, size);
            float scale, offset;
            if (symmetric)
                fit_symmetric(&g, &scale, &offset);
            else
                fit_affine(&g, &scale, &offset);
            scale = to_half(scale, 0.0f);
            offset = symmetric ? -8.0f * scale : to_half(offset, fabsf(scale) * 0x1p-8f);
            ((float *)op->p[2])[row * groups + j] = scale;
            ((float *)op->p[3])[row * groups + j] = offset;
            const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
            for (int i = 0; i < g.vectors; i++) {
                lg_f32x16 q = levels(g.x[i], inverse, offset);
                const int64_t left = (size - i * LG_LANES) / 2;
                uint8_t whole[LG_LANES], pairs[LG_LANES / 2];
                store_bytes(whole, q);
                for (int k = 0; k < LG_LANES / 2; k++)
                    pairs[k] = (uint8_t)(whole[2 * k] | whole[2 * k + 1] << 4);
                memcpy(values + (first + i * LG_LANES) / 2, pairs,
                       (size_t)(left < LG_LANES / 2 ? left : LG_LANES / 2));
            }
        }
    }
}

/* w = scale * (q - 128), the largest of a row at 127. n: rows, width;
 * p: weight fp32, values [rows, width], scales [rows], offsets [rows]. */
LG_API void lg_quantize_8bit(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float *weight = (const float *)op->p[0] + row * width;
        uint8_t *values = (uint8_t *)op->p[1] + row * width;
        lg_f32x16 largest = {};
        for (int64_t i = 0; i < width; i += LG_LANES) {
            lg_f32x16 x = lg_load_n(weight + i, width - i);
            largest = lg_max(largest, lg_max(x, -x));
        }
        const float range = lg_max_lane(largest);
        const float scale = range > TINY ? range / 127.0f : 0.0f;
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        ((float *)op->p[2])[row] = scale;
        ((float *)op->p[3])[row] = -128.0f * scale;
        for (int64_t i = 0; i < width; i += LG_LANES) {
            lg_f32x16 q = nearest(lg_load_n(weight + i, width - i) * inverse) + 128.0f;
            const int64_t left = width - i;
            uint8_t bytes[LG_LANES];
            store_bytes(bytes, q);
            memcpy(values + i, bytes, (size_t)(left < LG_LANES ? left : LG_LANES));
        }
    }
}
