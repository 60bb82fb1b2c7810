/* kv_move: rows of many layers between the pages and one buffer, and the checksum on the way.
 *
 * The buffer is [layers, 2 (K, V), tokens, heads, head_dim] in the wire's dtype, and for 8 bits the
 * scales [layers, 2, tokens, heads] fp32 behind it. For the thread that calls it: neither the team nor
 * the lock of lg_run is touched, which a forward pass may hold for a second.
 */
#include "crc32c.h"
#include "kv_rows.h"
#include "op.h"

/* So much is moved before its checksum is taken: it is in the first-level cache still. */
#define PIECE_BYTES 16384

typedef float any_float __attribute__((aligned(1))); /* a buffer may begin anywhere */

/* As kernels/kv_rows.py packs it. */
typedef struct {
    int64_t layer_start, num_layers, token_start, num_tokens, head_start, num_heads;
    int64_t block_size, kv_heads, head_dim, page_dtype, wire_dtype;
} lg_kv_range;

typedef struct {
    char *k, *v;
    float *k_scale, *v_scale; /* NULL for float dtypes */
} lg_kv_layer;

/* `heads` heads of `width` elements, one behind the other on both sides. */
typedef void (*lg_kv_mover)(const char *from, const any_float *from_scale, char *to,
                            any_float *to_scale, int64_t heads, int64_t width);

LG_INLINE void convert(int from_dtype, int to_dtype, const char *from,
                       const any_float *from_scale, char *to, any_float *to_scale, int64_t heads,
                       int64_t width) {
    const int quantized = to_dtype == LG_KV_INT8 || to_dtype == LG_KV_FP8;
    const int scaled = from_dtype == LG_KV_INT8 || from_dtype == LG_KV_FP8;
    for (int64_t head = 0; head < heads; head++) {
        const float scale = scaled ? from_scale[head] : 1.0f;
        float inverse = 1.0f;
        if (quantized) {
            lg_f32x16 most = {};
            lg_i32x16 nan = {};
            for (int64_t i = 0; i < width; i += LG_LANES) {
                lg_f32x16 v = lg_kv_load(from_dtype, from, i, width - i);
                if (scaled) v *= scale;
                lg_kv_see(v, &most, &nan);
            }
            float new_scale;
            inverse = lg_kv_scale(to_dtype, most, nan, &new_scale);
            to_scale[head] = new_scale;
        }
        for (int64_t i = 0; i < width; i += LG_LANES) {
            lg_f32x16 v = lg_kv_load(from_dtype, from, i, width - i);
            if (scaled) v *= scale;
            if (quantized) v *= inverse;
            lg_kv_store(to_dtype, to, i, v, width - i);
        }
        from += width * lg_kv_bytes(from_dtype);
        to += width * lg_kv_bytes(to_dtype);
    }
}

#define SAME(dtype, quantized)                                                               \
    static void same_##dtype(const char *from, const any_float *from_scale, char *to,        \
                             any_float *to_scale, int64_t heads, int64_t width) {            \
        memcpy(to, from, (size_t)(heads * width * lg_kv_bytes(dtype)));                      \
        if (quantized) memcpy(to_scale, from_scale, (size_t)heads * sizeof(float));          \
    }
#define MOVER(from_dtype, to_dtype)                                                          \
    static void from_##from_dtype##_to_##to_dtype(                                           \
        const char *from, const any_float *from_scale, char *to, any_float *to_scale,        \
        int64_t heads, int64_t width) {                                                      \
        convert(from_dtype, to_dtype, from, from_scale, to, to_scale, heads, width);         \
    }
#define MOVERS(dtype, a, b, c, d) MOVER(dtype, a) MOVER(dtype, b) MOVER(dtype, c) MOVER(dtype, d)

SAME(LG_KV_F32, 0)
SAME(LG_KV_BF16, 0)
SAME(LG_KV_F16, 0)
SAME(LG_KV_INT8, 1)
SAME(LG_KV_FP8, 1)
MOVERS(LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_BF16, LG_KV_F32, LG_KV_F16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_F16, LG_KV_F32, LG_KV_BF16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_INT8, LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_FP8)
MOVERS(LG_KV_FP8, LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_INT8)

static const lg_kv_mover movers[LG_KV_DTYPES][LG_KV_DTYPES] = {
    {same_LG_KV_F32, from_LG_KV_F32_to_LG_KV_BF16, from_LG_KV_F32_to_LG_KV_F16,
     from_LG_KV_F32_to_LG_KV_INT8, from_LG_KV_F32_to_LG_KV_FP8},
    {from_LG_KV_BF16_to_LG_KV_F32, same_LG_KV_BF16, from_LG_KV_BF16_to_LG_KV_F16,
     from_LG_KV_BF16_to_LG_KV_INT8, from_LG_KV_BF16_to_LG_KV_FP8},
    {from_LG_KV_F16_to_LG_KV_F32, from_LG_KV_F16_to_LG_KV_BF16, same_LG_KV_F16,
     from_LG_KV_F16_to_LG_KV_INT8, from_LG_KV_F16_to_LG_KV_FP8},
    {from_LG_KV_INT8_to_LG_KV_F32, from_LG_KV_INT8_to_LG_KV_BF16, from_LG_KV_INT8_to_LG_KV_F16,
     same_LG_KV_INT8, from_LG_KV_INT8_to_LG_KV_FP8},
    {from_LG_KV_FP8_to_LG_KV_F32, from_LG_KV_FP8_to_LG_KV_BF16, from_LG_KV_FP8_to_LG_KV_F16,
     from_LG_KV_FP8_to_LG_KV_INT8, same_LG_KV_FP8},
};

/* Where the next rows are in the buffer, and what of it has its checksum. */
typedef struct {
    char *rows;
    any_float *scales;
    const char *checked;
    uint32_t crc;
} lg_kv_cursor;

LG_INLINE void check_up_to(lg_kv_cursor *at, const char *end) {
    at->crc = lg_crc32c_extend(at->crc, at->checked, (size_t)(end - at->checked));
    at->checked = end;
}

/* `heads` heads, the first of which is the `place`-th in the pages; with `gather` to the buffer. */
LG_INLINE void move(const lg_kv_range *range, const lg_kv_layer *layer, int value, int64_t place,
                    int64_t heads, int gather, lg_kv_cursor *at) {
    const int64_t width = range->head_dim;
    const int wire_dtype = (int)range->wire_dtype, page_dtype = (int)range->page_dtype;
    char *page = (value ? layer->v : layer->k) + place * width * lg_kv_bytes(page_dtype);
    float *scale = value ? layer->v_scale : layer->k_scale;
    if (scale != NULL) scale += place;
    if (gather)
        movers[page_dtype][wire_dtype](page, scale, at->rows, at->scales, heads, width);
    else
        movers[wire_dtype][page_dtype](at->rows, at->scales, page, scale, heads, width);
    at->rows += heads * width * lg_kv_bytes(wire_dtype);
    at->scales += heads;
    if (gather && at->rows - at->checked >= PIECE_BYTES) check_up_to(at, at->rows);
}

/* `blocks`: those of the range's tokens, from the one that has the first on. */
LG_INLINE uint32_t move_all(const lg_kv_range *range, const lg_kv_layer *layers,
                            const int64_t *blocks, char *buffer, uint32_t crc, int gather) {
    const int64_t size = range->block_size, kv_heads = range->kv_heads, heads = range->num_heads;
    const int64_t head_bytes = range->head_dim * lg_kv_bytes((int)range->wire_dtype);
    const int64_t num_heads = range->num_layers * 2 * range->num_tokens * heads;
    const int quantized = range->wire_dtype == LG_KV_INT8 || range->wire_dtype == LG_KV_FP8;
    const int64_t most = PIECE_BYTES / (heads * head_bytes) + 1; /* tokens of a piece */
    char *scales = buffer + num_heads * head_bytes;
    lg_kv_cursor at = {buffer, (any_float *)scales, buffer, crc};
    for (int64_t i = 0; i < range->num_layers * 2; i++) {
        const lg_kv_layer *layer = layers + range->layer_start + i / 2;
        int64_t place = range->token_start % size, left = range->num_tokens;
        while (left > 0) {
            int64_t tokens = size - place % size;
            if (tokens > left) tokens = left;
            if (tokens > most) tokens = most;
            const int64_t slot = blocks[place / size] * size + place % size;
            if (heads == kv_heads)
                move(range, layer, (int)(i % 2), slot * heads, tokens * heads, gather, &at);
            else
                for (int64_t t = 0; t < tokens; t++)
                    move(range, layer, (int)(i % 2), (slot + t) * kv_heads + range->head_start,
                         heads, gather, &at);
            place += tokens;
            left -= tokens;
        }
    }
    if (gather) check_up_to(&at, scales + (quantized ? num_heads * (int64_t)sizeof(float) : 0));
    return at.crc;
}

/* Fills `out`; returns its checksum behind that of `crc`. */
LG_API uint32_t lg_kv_read(const lg_kv_range *range, const lg_kv_layer *layers,
                           const int64_t *blocks, char *out, uint32_t crc) {
    return move_all(range, layers, blocks, out, crc, 1);
}

/* Lands `data` in the pages if `expected` is its checksum behind that of `crc`; returns whether.
 * With `kept`, memory for `size` bytes, what is checked and landed is a copy there: `data` may
 * change meanwhile. */
LG_API int lg_kv_write(const lg_kv_range *range, const lg_kv_layer *layers, const int64_t *blocks,
                       char *data, char *kept, int64_t size, uint32_t crc, uint32_t expected) {
    if (kept == NULL) {
        crc = lg_crc32c_extend(crc, data, (size_t)size);
    } else {
        for (int64_t i = 0; i < size; i += PIECE_BYTES) {
            const int64_t piece = size - i < PIECE_BYTES ? size - i : PIECE_BYTES;
            memcpy(kept + i, data + i, (size_t)piece);
            crc = lg_crc32c_extend(crc, kept + i, (size_t)piece);
        }
        data = kept;
    }
    if (crc != expected) return 0;
    move_all(range, layers, blocks, data, 0, 0);
    return 1;
}
