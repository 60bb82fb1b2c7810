/* kv_scatter: new rows of K and V to their slots in one layer's pages. */
#include "kv_rows.h"
#include "op.h"

LG_INLINE void store_row(int dtype, const float *row, char *out, float *scale, int64_t width) {
    float inverse = 1.0f;
    if (scale != NULL) {
        lg_f32x16 most = {};
        lg_i32x16 nan = {};
        for (int64_t i = 0; i < width; i += LG_LANES)
            lg_kv_see(lg_load_n(row + i, width - i), &most, &nan);
        inverse = lg_kv_scale(dtype, most, nan, scale);
    }
    for (int64_t i = 0; i < width; i += LG_LANES) {
        lg_f32x16 v = lg_load_n(row + i, width - i);
        if (scale != NULL) v *= inverse;
        lg_kv_store(dtype, out, i, v, width - i);
    }
}

LG_INLINE void scatter(const lg_op *op, const lg_team *team, int dtype, int quantized) {
    const int64_t heads = op->n[1], width = op->n[2], row = width * lg_kv_bytes(dtype);
    int64_t begin, end;
    lg_share(team, 2 * op->n[0] * heads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const int64_t token = i / (2 * heads), value = i / heads % 2, head = i % heads;
        const int64_t place = ((const int64_t *)op->p[6])[token] * heads + head;
        const float *new = (const float *)op->p[value] + token * op->n[4 + value] + head * width;
        float *scales = op->p[4 + value];
        store_row(dtype, new, (char *)op->p[2 + value] + place * row,
                  quantized ? scales + place : NULL, width);
    }
}

/* n: tokens, KV heads, head_dim, dtype, strides of a token in k and in v;
 * p: k, v, pages of k and of v, their scales (NULL for float dtypes), slots int64. */
LG_API void lg_kv_scatter(const lg_op *op, lg_team *team) {
    switch (op->n[3]) {
    case LG_KV_F32: scatter(op, team, LG_KV_F32, 0); break;
    case LG_KV_BF16: scatter(op, team, LG_KV_BF16, 0); break;
    case LG_KV_F16: scatter(op, team, LG_KV_F16, 0); break;
    case LG_KV_INT8: scatter(op, team, LG_KV_INT8, 1); break;
    default: scatter(op, team, LG_KV_FP8, 1);
    }
}
