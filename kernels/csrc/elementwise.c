/* elementwise: activations, rotary embedding and rows of tables, all on fp32 activations. */
#include "activation.h"
#include "op.h"
#include "vec.h"

enum { SILU_MUL, GELU_MUL, GELU };

/* n: rows, width of out, stride of x, stride of out; p: x, out. */
LG_INLINE void activate(const lg_op *op, lg_team *team, int kind) {
    const int64_t width = op->n[1];
    int64_t begin, end;
    /* Shares of elements, not rows: a single row is split as well. */
    const int64_t pieces = (width + 255) / 256;
    lg_share(team, op->n[0] * pieces, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t row = task / pieces, first = task % pieces * 256;
        const int64_t last = first + 256 < width ? first + 256 : width;
        const float *x = (const float *)op->p[0] + row * op->n[2];
        float *out = (float *)op->p[1] + row * op->n[3];
        for (int64_t i = first; i < last; i += LG_LANES) {
            lg_f32x16 v = lg_load_n(x + i, last - i);
            v = kind == SILU_MUL ? lg_silu(v) : lg_gelu_tanh(v);
            if (kind != GELU) v *= lg_load_n(x + width + i, last - i);
            lg_store_n(out + i, v, last - i);
        }
    }
}

LG_API void lg_silu_mul(const lg_op *op, lg_team *team) { activate(op, team, SILU_MUL); }
LG_API void lg_gelu_mul(const lg_op *op, lg_team *team) { activate(op, team, GELU_MUL); }
LG_API void lg_gelu(const lg_op *op, lg_team *team) { activate(op, team, GELU); }

/* cos, then sin, of position * frequency. n: tokens, frequencies; f: scale;
 * p: positions int64, frequencies, out [tokens, 2, frequencies]. */
LG_API void lg_rotation_tables(const lg_op *op, lg_team *team) {
    const int64_t half = op->n[1];
    const float *frequencies = op->p[1];
    const float scale = (float)op->f[0];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t t = begin; t < end; t++) {
        float *row = (float *)op->p[2] + t * 2 * half;
        const float position = (float)((const int64_t *)op->p[0])[t];
        for (int64_t i = 0; i < half; i++) {
            const float angle = position * frequencies[i];
            row[i] = cosf(angle) * scale;
            row[half + i] = sinf(angle) * scale;
        }
    }
}

/* Rotates (i, i + half) of each head. n: tokens, heads, half, row stride; p: heads, tables. */
LG_API void lg_rope(const lg_op *op, lg_team *team) {
    const int64_t heads = op->n[1], half = op->n[2];
    int64_t begin, end;
    lg_share(team, op->n[0] * heads, &begin, &end);
    for (int64_t task = begin; task < end; task++) {
        const int64_t t = task / heads;
        float *low = (float *)op->p[0] + t * op->n[3] + task % heads * 2 * half;
        const float *cosine = (const float *)op->p[1] + t * 2 * half, *sine = cosine + half;
        for (int64_t i = 0; i < half; i += LG_LANES) {
            const int64_t left = half - i;
            lg_f32x16 a = lg_load_n(low + i, left), b = lg_load_n(low + half + i, left);
            lg_f32x16 c = lg_load_n(cosine + i, left), s = lg_load_n(sine + i, left);
            lg_store_n(low + i, a * c - b * s, left);
            lg_store_n(low + half + i, b * c + a * s, left);
        }
    }
}

/* out (+)= table[index] * scale. n: rows, width, dtype of the table (0 fp32, 1 bf16, 2 fp16), add;
 * f: scale; p: table, indices int64, out. */
LG_API void lg_take_rows(const lg_op *op, lg_team *team) {
    const int64_t width = op->n[1], dtype = op->n[2];
    const float scale = (float)op->f[0];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const int64_t start = ((const int64_t *)op->p[1])[row] * width;
        float *out = (float *)op->p[2] + row * width;
        for (int64_t i = 0; i < width; i += LG_LANES) {
            const int64_t left = width - i;
            lg_f32x16 v;
            if (dtype == 0) {
                v = lg_load_n((const float *)op->p[0] + start + i, left);
            } else {
                uint16_t half[LG_LANES] = {};
                const uint16_t *from = (const uint16_t *)op->p[0] + start + i;
                memcpy(half, from, sizeof(uint16_t) * (size_t)(left < LG_LANES ? left : LG_LANES));
                v = dtype == 1 ? lg_bf16_load(half) : lg_f16_load(half);
            }
            v *= scale;
            if (op->n[3]) v += lg_load_n(out + i, left);
            lg_store_n(out + i, v, left);
        }
    }
}
