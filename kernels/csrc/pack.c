/* pack: weights into the panels of gemm.h, and single rows out of them again. */
#include "gemm.h"

#define BLOCK 16 /* elements of a row that are moved at once: a line of words */

/* Transposes rows into the outputs of a panel from the first one on at `to`. `size`: of an element in
 * bytes; the row's last one may be incomplete. */
LG_INLINE void pack_rows(int size, const uint8_t *from, int64_t stride, int64_t rows,
                         int64_t row_bytes, uint8_t *to) {
    const int64_t elements = (row_bytes + size - 1) / size;
    for (int64_t first = 0; first < elements; first += BLOCK) {
        const int64_t left = row_bytes - first * size;
        for (int64_t r = 0; r < rows; r++) {
            uint8_t line[BLOCK * 4] = {};
            if (left >= BLOCK * size)
                memcpy(line, from + r * stride + first * size, (size_t)(BLOCK * size));
            else
                memcpy(line, from + r * stride + first * size, (size_t)left);
            uint8_t *place = to + (first * LG_PANEL + r) * size;
            const int64_t count = elements - first < BLOCK ? elements - first : BLOCK;
            for (int64_t i = 0; i < count; i++)
                memcpy(place + i * LG_PANEL * size, line + i * size, (size_t)size);
        }
    }
}

LG_INLINE void pack(int size, const lg_op *op, lg_team *team) {
    const int64_t rows = op->n[0], row_bytes = op->n[1], stride = op->n[2];
    /* A gated weight is two matrices, and a panel half of each. */
    const int64_t parts = op->n[3] ? 2 : 1, width = LG_PANEL / parts, part_rows = rows / parts;
    const int64_t panel_bytes = (row_bytes + size - 1) / size * size * LG_PANEL;
    const int64_t panels = (rows + LG_PANEL - 1) / LG_PANEL;
    for (int64_t panel; (panel = lg_take(team, 0, panels)) >= 0;) {
        const int64_t first = panel * width, left = part_rows - first;
        uint8_t *to = (uint8_t *)op->p[1] + panel * panel_bytes;
        if (left < width) memset(to, 0, (size_t)panel_bytes);
        for (int64_t part = 0; part < parts; part++)
            pack_rows(size, (const uint8_t *)op->p[0] + (part * part_rows + first) * stride, stride,
                      left < width ? left : width, row_bytes, to + part * width * size);
    }
}

/* Words of 4 bytes (every kind but f16), half-words of 2 (f16, and scales), bytes (zero points).
 * n: rows, bytes a row, stride of the rows in bytes, whether gated; p: from, to. */
LG_API void lg_pack_words(const lg_op *op, lg_team *team) { pack(4, op, team); }
LG_API void lg_pack_halves(const lg_op *op, lg_team *team) { pack(2, op, team); }
LG_API void lg_pack_bytes(const lg_op *op, lg_team *team) { pack(1, op, team); }

enum { F32, BF16, F16, Q8, Q4 };

LG_INLINE float half_to_float(uint16_t bits) {
    uint16_t half[LG_WIDTH] = {bits};
    return lg_fvec_from_f16(half)[0];
}

LG_INLINE float bf16_to_float(uint32_t bits) {
    float value;
    bits <<= 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Elements [k, k + count) of one output, as many as its word holds; `b` points at its word. */
LG_INLINE int unpack(int kind, const uint8_t *b, float *to) {
    uint32_t word = 0;
    memcpy(&word, b, kind == F16 ? 2 : 4);
    switch (kind) {
        case F32: memcpy(to, &word, 4); return 1;
        case F16: to[0] = half_to_float((uint16_t)word); return 1;
        case BF16:
            to[0] = bf16_to_float(word & 0xffff);
            to[1] = bf16_to_float(word >> 16);
            return 2;
        case Q8:
            for (int i = 0; i < 4; i++) to[i] = (float)(word >> 8 * i & 255);
            return 4;
        default:
            for (int i = 0; i < 8; i++) to[i] = (float)(word >> 4 * i & 15);
            return 8;
    }
}

/* Scale and offset of one group; types as in lg_linear_q8. */
LG_INLINE void group_terms(const lg_op *op, int64_t at, float *scale, float *offset) {
    const void *scales = op->p[3], *offsets = op->p[4];
    *scale = op->n[5] == 2 ? half_to_float(((const uint16_t *)scales)[at])
                           : ((const float *)scales)[at];
    switch (op->n[6]) {
        case 0: *offset = -*scale * (float)op->n[7]; break;
        case 1: *offset = -*scale * (float)((const uint8_t *)offsets)[at]; break;
        case 2: *offset = half_to_float(((const uint16_t *)offsets)[at]); break;
        default: *offset = ((const float *)offsets)[at]; break;
    }
}

/* out (+)= row index of the weight * scale. n: rows, depth, kind (0 fp32, 1 bf16, 2 fp16, 3 q8,
 * 4 q4), add, group size, type of scales, type of offsets, zero point (the last four as in
 * lg_linear_q8); f: scale; p: weight, indices int64, out [rows, depth], scales, offsets. */
LG_API void lg_take_packed_rows(const lg_op *op, lg_team *team) {
    const int64_t depth = op->n[1];
    const int kind = (int)op->n[2];
    static const int64_t per_word[] = {1, 2, 1, 4, 8};
    const int64_t word_bytes = kind == F16 ? 2 : 4;
    const int64_t words = (depth + per_word[kind] - 1) / per_word[kind];
    const float scale = (float)op->f[0];
    int64_t begin, end;
    lg_share(team, op->n[0], &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        const int64_t index = ((const int64_t *)op->p[1])[row], panel = index / LG_PANEL;
        const uint8_t *from = (const uint8_t *)op->p[0] +
                              (panel * words * LG_PANEL + index % LG_PANEL) * word_bytes;
        float *out = (float *)op->p[2] + row * depth;
        const int64_t group = op->n[4], groups = group > 0 ? (depth + group - 1) / group : 0;
        float factor = 1.0f, offset = 0.0f;
        /* One word in 128 bytes: without this, each waits for the one before. */
        for (int64_t w = 0; w < words; w++)
            __builtin_prefetch(from + w * LG_PANEL * word_bytes);
        for (int64_t w = 0, k = 0; w < words; w++, from += LG_PANEL * word_bytes) {
            float values[8];
            const int count = unpack(kind, from, values);
            if (group > 0) {
                if (k % group == 0)
                    group_terms(op, (panel * groups + k / group) * LG_PANEL + index % LG_PANEL,
                                &factor, &offset);
                for (int i = 0; i < count; i++) values[i] = factor * values[i] + offset;
            }
            for (int i = 0; i < count && k < depth; i++, k++)
                out[k] = values[i] * scale + (op->n[3] ? out[k] : 0.0f);
        }
    }
}
