/* kv_move: rows of many layers between the pages and one buffer, and the checksum on the way.
 *
 * The buffer is [layers, 2 (K, V), tokens, heads, head_dim] in the wire's dtype, and for 8 bits the
 * scales [layers, 2, tokens, heads] fp32 behind it. For the thread that calls it: neither the team nor
 * the lock of lg_run is touched, which a forward pass may hold for a second.
 */
#include "crc32c.h"
#include "kv_rows.h"
#include "op.h"

#define CACHE_LINE 64
/* So much is moved at once, and converted before its checksum is taken: it is in the cache still. */
#define PIECE_BYTES 16384
/* Of a buffer that is read, so far ahead is fetched. */
#define AHEAD_BYTES 2048

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

/* `heads` heads of `width` elements, one behind the other on both sides. `ahead`: the heads
 * that come next in the pages, of `ahead_bytes` each, are fetched meanwhile: no CPU can guess where
 * the next block is. */
typedef void (*lg_kv_mover)(const char *from, const any_float *from_scale, char *to,
                            any_float *to_scale, int64_t heads, int64_t width, const char *ahead,
                            int64_t ahead_bytes);

LG_INLINE void fetch(const char *line, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(line + i, 0, 2);
}

LG_INLINE void convert(int from_dtype, int to_dtype, const char *from,
                       const any_float *from_scale, char *to, any_float *to_scale, int64_t heads,
                       int64_t width, const char *ahead, int64_t ahead_bytes) {
    const int quantized = to_dtype == LG_KV_INT8 || to_dtype == LG_KV_FP8;
    const int scaled = from_dtype == LG_KV_INT8 || from_dtype == LG_KV_FP8;
    for (int64_t head = 0; head < heads; head++) {
        fetch(ahead + head * ahead_bytes, ahead_bytes);
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

#define MOVER(from_dtype, to_dtype)                                                          \
    static void from_##from_dtype##_to_##to_dtype(                                           \
        const char *from, const any_float *from_scale, char *to, any_float *to_scale,        \
        int64_t heads, int64_t width, const char *ahead, int64_t ahead_bytes) {              \
        convert(from_dtype, to_dtype, from, from_scale, to, to_scale, heads, width, ahead,   \
                ahead_bytes);                                                                \
    }
#define MOVERS(dtype, a, b, c, d) MOVER(dtype, a) MOVER(dtype, b) MOVER(dtype, c) MOVER(dtype, d)

MOVERS(LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_BF16, LG_KV_F32, LG_KV_F16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_F16, LG_KV_F32, LG_KV_BF16, LG_KV_INT8, LG_KV_FP8)
MOVERS(LG_KV_INT8, LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_FP8)
MOVERS(LG_KV_FP8, LG_KV_F32, LG_KV_BF16, LG_KV_F16, LG_KV_INT8)

static const lg_kv_mover movers[LG_KV_DTYPES][LG_KV_DTYPES] = {
    {NULL, from_LG_KV_F32_to_LG_KV_BF16, from_LG_KV_F32_to_LG_KV_F16,
     from_LG_KV_F32_to_LG_KV_INT8, from_LG_KV_F32_to_LG_KV_FP8},
    {from_LG_KV_BF16_to_LG_KV_F32, NULL, from_LG_KV_BF16_to_LG_KV_F16,
     from_LG_KV_BF16_to_LG_KV_INT8, from_LG_KV_BF16_to_LG_KV_FP8},
    {from_LG_KV_F16_to_LG_KV_F32, from_LG_KV_F16_to_LG_KV_BF16, NULL,
     from_LG_KV_F16_to_LG_KV_INT8, from_LG_KV_F16_to_LG_KV_FP8},
    {from_LG_KV_INT8_to_LG_KV_F32, from_LG_KV_INT8_to_LG_KV_BF16, from_LG_KV_INT8_to_LG_KV_F16,
     NULL, from_LG_KV_INT8_to_LG_KV_FP8},
    {from_LG_KV_FP8_to_LG_KV_F32, from_LG_KV_FP8_to_LG_KV_BF16, from_LG_KV_FP8_to_LG_KV_F16,
     from_LG_KV_FP8_to_LG_KV_INT8, NULL},
};

/* A place in the range, and the rows that are moved from there at once. */
typedef struct {
    int64_t strip; /* 2 layer + (0: K, 1: V), from the range's first layer on */
    int64_t token; /* from the beginning of the first block on */
    int64_t tokens;
    char *page;
    float *scale;
} lg_kv_piece;

static void find_rows(const lg_kv_range *range, const lg_kv_layer *layers, const int64_t *blocks,
                      int64_t most, lg_kv_piece *piece) {
    const lg_kv_layer *layer = layers + range->layer_start + piece->strip / 2;
    const int64_t size = range->block_size, in_block = piece->token % size;
    int64_t tokens = range->token_start % size + range->num_tokens - piece->token;
    if (tokens > size - in_block) tokens = size - in_block;
    piece->tokens = tokens < most ? tokens : most;
    const int64_t slot = blocks[piece->token / size] * size + in_block;
    const int64_t place = slot * range->kv_heads + range->head_start;
    const int64_t head_bytes = range->head_dim * lg_kv_bytes((int)range->page_dtype);
    piece->page = (piece->strip % 2 ? layer->v : layer->k) + place * head_bytes;
    piece->scale = piece->strip % 2 ? layer->v_scale : layer->k_scale;
    if (piece->scale != NULL) piece->scale += place;
}

/* `blocks`: those of the range's tokens, the one with the first of them first. Gathers to the buffer,
 * or lands what it holds; returns its checksum behind that of `crc`. What lands are the bytes that
 * were checked, whoever writes the buffer meanwhile: where they are not copied at once, by way of
 * `kept`, which has room for the whole buffer. */
LG_INLINE uint32_t move_all(const lg_kv_range *range, const lg_kv_layer *layers,
                            const int64_t *blocks, char *buffer, char *kept, uint32_t crc,
                            int gather) {
    const int wire_dtype = (int)range->wire_dtype, page_dtype = (int)range->page_dtype;
    const int quantized = wire_dtype == LG_KV_INT8 || wire_dtype == LG_KV_FP8;
    const int same = page_dtype == wire_dtype;
    const int64_t width = range->head_dim, head_bytes = width * lg_kv_bytes(wire_dtype);
    const int64_t page_bytes = width * lg_kv_bytes(page_dtype);
    const int64_t row_bytes = range->num_heads * head_bytes;
    const int64_t first = range->token_start % range->block_size, end = first + range->num_tokens;
    /* Rows lie one behind the other where all of their heads are wanted. */
    const int64_t most = range->num_heads == range->kv_heads ? PIECE_BYTES / row_bytes + 1 : 1;
    const lg_kv_mover mover =
        gather ? movers[page_dtype][wire_dtype] : movers[wire_dtype][page_dtype];
    const int64_t num_rows = range->num_layers * 2 * range->num_tokens;
    const int64_t scales_bytes =
        quantized ? num_rows * range->num_heads * (int64_t)sizeof(float) : 0;
    char *rows = buffer, *const scales_start = buffer + num_rows * row_bytes;
    const char *checked = buffer;
    char *const kept_rows = kept + scales_bytes;
    if (!gather) memcpy(kept, scales_start, (size_t)scales_bytes);
    any_float *scales = (any_float *)(gather ? scales_start : kept);
    lg_kv_piece now = {.token = first};
    find_rows(range, layers, blocks, most, &now);
    while (now.strip < 2 * range->num_layers) {
        const int64_t heads = now.tokens * range->num_heads, bytes = heads * head_bytes;
        lg_kv_piece next = {.strip = now.strip, .token = now.token + now.tokens, .page = now.page};
        if (next.token == end) next.strip++, next.token = first;
        if (next.strip < 2 * range->num_layers) find_rows(range, layers, blocks, most, &next);
        if (gather && same) {
            crc = lg_crc32c_copy(crc, rows, now.page, (size_t)bytes, next.page);
            checked = rows + bytes;
            if (quantized) memcpy(scales, now.scale, (size_t)heads * sizeof(float));
        } else if (gather) {
            mover(now.page, now.scale, rows, scales, heads, width, next.page, page_bytes);
        } else if (same) {
            crc = lg_crc32c_land(crc, now.page, rows, (size_t)bytes, rows + AHEAD_BYTES);
            if (quantized) memcpy(now.scale, scales, (size_t)heads * sizeof(float));
        } else {
            crc = lg_crc32c_copy(crc, kept_rows, rows, (size_t)bytes, rows + AHEAD_BYTES);
            mover(kept_rows, scales, now.page, now.scale, heads, width, next.page, page_bytes);
        }
        rows += bytes;
        scales += heads;
        if (gather && rows - checked >= PIECE_BYTES) {
            crc = lg_crc32c_extend(crc, checked, (size_t)(rows - checked));
            checked = rows;
        }
        now = next;
    }
    if (gather)
        return lg_crc32c_extend(crc, checked, (size_t)(scales_start + scales_bytes - checked));
#if defined(__AVX2__)
    _mm_sfence();
#endif
    return lg_crc32c_extend(crc, kept, (size_t)scales_bytes);
}

/* Fills `out`; returns its checksum behind that of `crc`. */
LG_API uint32_t lg_kv_read(const lg_kv_range *range, const lg_kv_layer *layers,
                           const int64_t *blocks, char *out, uint32_t crc) {
    return move_all(range, layers, blocks, out, NULL, crc, 1);
}

/* Lands `data`; returns its checksum behind that of `crc`. Where that is not what it should be, the
 * rows are to land once more. `kept`: memory of as many bytes, or NULL where the pages have the
 * wire's dtype and it has no scales. */
LG_API uint32_t lg_kv_write(const lg_kv_range *range, const lg_kv_layer *layers,
                            const int64_t *blocks, char *data, char *kept, uint32_t crc) {
    return move_all(range, layers, blocks, data, kept, crc, 0);
}
