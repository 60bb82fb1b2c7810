/* norm: RMSNorm and LayerNorm of fp32 rows, with the residual add before or after. */
#include "op.h"
#include "vec.h"

/* A row's sums run in one order: lane by lane over the row, then lg_sum. */
LG_INLINE float sum_squares(const float *x, int64_t n) {
    lg_f32x16 total = {};
    for (int64_t i = 0; i < n; i += LG_LANES) {
        lg_f32x16 v = lg_load_n(x + i, n - i);
        total += v * v;
    }
    return lg_sum(total);
}

LG_INLINE void rms_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
    lg_f32x16 scale = lg_splat(1.0f / sqrtf(sum_squares(x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += LG_LANES)
        lg_store_n(out + i, lg_load_n(x + i, n - i) * scale * lg_load_n(weight + i, n - i), n - i);
}

/* out = rms_norm(x). n: rows, width, stride of x, stride of out, heads a row (1: plain rows; else
 * each of them, `width` apart, is normalised alone); f: eps; p: x, weight [width], out. */
LG_API void lg_rms_norm(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1], heads = op->n[4];
    int64_t begin, end;
    lg_share(team, op->n[0] * heads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        int64_t row = i / heads, head = i % heads;
        rms_row((const float *)op->p[0] + row * op->n[2] + head * width, op->p[1],
                (float *)op->p[2] + row * op->n[3] + head * width, width, (float)op->f[0]);
    }
}

/* residual += x, then out = rms_norm(residual); all rows contiguous.
 * n: rows, width; f: eps; p: x, residual, weight, out. */
LG_API void lg_add_rms_norm(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)op->p[0] + row * width;
        float *residual = (float *)op->p[1] + row * width;
        for (int64_t i = 0; i < width; i += LG_LANES)
            lg_store_n(residual + i, lg_load_n(x + i, width - i) + lg_load_n(residual + i, width - i),
                       width - i);
        rms_row(residual, op->p[2], (float *)op->p[3] + row * width, width, (float)op->f[0]);
    }
}

/* residual += rms_norm(x); all rows contiguous. n: rows, width; f: eps; p: x, residual, weight. */
LG_API void lg_rms_norm_add(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1];
    const float *weight = op->p[2];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)op->p[0] + row * width;
        float *residual = (float *)op->p[1] + row * width;
        lg_f32x16 scale =
            lg_splat(1.0f / sqrtf(sum_squares(x, width) / (float)width + (float)op->f[0]));
        for (int64_t i = 0; i < width; i += LG_LANES)
            lg_store_n(residual + i,
                       lg_load_n(residual + i, width - i) +
                           lg_load_n(x + i, width - i) * scale * lg_load_n(weight + i, width - i),
                       width - i);
    }
}

LG_INLINE void layer_row(const float *x, const float *weight, const float *bias, float *out,
                         int64_t n, float eps) {
    lg_f32x16 total = {};
    for (int64_t i = 0; i < n; i += LG_LANES) total += lg_load_n(x + i, n - i);
    const float mean = lg_sum(total) / (float)n;
    lg_f32x16 squares = {};
    for (int64_t i = 0; i < n; i += LG_LANES) {
        lg_f32x16 v = lg_load_n(x + i, n - i) - mean;
        if (n - i < LG_LANES) { /* the lanes past the end hold -mean */
            float kept[LG_LANES] = {};
            memcpy(kept, &v, (size_t)(n - i) * sizeof(float));
            v = lg_load(kept);
        }
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(lg_sum(squares) / (float)n + eps);
    for (int64_t i = 0; i < n; i += LG_LANES) {
        lg_f32x16 y = (lg_load_n(x + i, n - i) - mean) * scale * lg_load_n(weight + i, n - i);
        lg_store_n(out + i, y + lg_load_n(bias + i, n - i), n - i);
    }
}

/* out = layer_norm(x), and with a residual: residual += x first, and of that. Rows contiguous.
 * n: rows, width; f: eps; p: x, residual or NULL, weight, bias, out. */
LG_API void lg_layer_norm(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const float *x = (const float *)op->p[0] + row * width;
        if (op->p[1] != NULL) {
            float *residual = (float *)op->p[1] + row * width;
            for (int64_t i = 0; i < width; i += LG_LANES)
                lg_store_n(residual + i,
                           lg_load_n(x + i, width - i) + lg_load_n(residual + i, width - i),
                           width - i);
            x = residual;
        }
        layer_row(x, op->p[2], op->p[3], (float *)op->p[4] + row * width, width, (float)op->f[0]);
    }
}
