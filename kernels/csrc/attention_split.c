/* attention_split: see the header. Each function here is compiled once and called by decode and
 * prefill alike: inlined twice, it might round differently. */
#include "attention_split.h"

#include "attention_few.h"
#include "attention_tile.h"

/* Finite, so that the difference of two of them is 0; far below any score. */
#define NO_SCORE (-1e30f)

int64_t lg_partial_floats(int64_t rows, int64_t width) {
    return 2 * lg_round_up(rows, LG_LANES) + rows * width;
}

lg_partial lg_partial_at(float *memory, int64_t rows, int64_t width) {
    (void)width;
    const int64_t padded = lg_round_up(rows, LG_LANES);
    return (lg_partial){memory, memory + padded, memory + 2 * padded};
}

static int is_paired(int dtype) {
    return HAS_PAIRS && (dtype == LG_KV_BF16 || dtype == LG_KV_INT8 || dtype == LG_KV_FP8);
}

/* The parts of the scratch memory. */
typedef struct {
    lg_tile_rows tile;
    float k_scale[TILE_KEYS], v_scale[TILE_KEYS];
    float scores[BLOCK_ROWS * TILE_KEYS];
    uint32_t weights[BLOCK_ROWS * TILE_KEYS];
    uint32_t *keys, *values, *queries;
    float *lanes; /* [rows][16]: the mass, lane by lane */
} workspace;

static int64_t tile_words(int64_t head_dim) {
    return TILE_KEYS * lg_round_up(head_dim, LG_LANES);
}

int64_t lg_attention_scratch(int64_t rows, int64_t head_dim) {
    return lg_round_up((int64_t)sizeof(workspace), 64) +
           4 * (2 * tile_words(head_dim) + rows * (head_dim + LG_LANES)) + 64;
}

static workspace *divide(void *scratch, int64_t rows, int64_t head_dim) {
    workspace *w = scratch;
    w->keys = (uint32_t *)((char *)scratch + lg_round_up((int64_t)sizeof(workspace), 64));
    w->values = w->keys + tile_words(head_dim);
    w->lanes = (float *)(w->values + tile_words(head_dim));
    w->queries = (uint32_t *)(w->lanes + rows * LG_LANES);
    return w;
}

void lg_gather_queries(lg_attention *a, const float *q, int64_t token_stride, void *scratch) {
    uint32_t *out = divide(scratch, a->rows, a->head_dim)->queries;
    const int paired = is_paired(a->dtype);
    const int64_t depth = paired ? a->head_dim / 2 : a->head_dim;
    a->q = out;
    for (int64_t i = 0; i < a->rows; i++) {
        const float *row = q + i / a->group * token_stride + i % a->group * a->head_dim;
        for (int64_t d = 0; d < a->head_dim; d += LG_LANES) {
            const int64_t left = a->head_dim - d;
            const lg_f32x16 v = lg_load_n(row + d, left) * a->scale;
            if (paired)
                lg_kv_store(LG_KV_BF16, out + i * depth, d, v, left);
            else
                lg_store_n((float *)out + i * depth + d, v, left);
        }
    }
}

/* The positions of keys that the rows [begin, end) see: a union of ranges. */
static int64_t first_key(const lg_attention *a, int64_t row) {
    const int64_t first = a->first_position + row / a->group - a->window + 1;
    return a->window == 0 || first < 0 ? 0 : first;
}
static int64_t end_key(const lg_attention *a, int64_t row) {
    return a->first_position + row / a->group + 1;
}

int64_t lg_first_split(const lg_attention *a) { return first_key(a, 0) / LG_SPLIT_KEYS; }
int64_t lg_end_split(const lg_attention *a) {
    return (end_key(a, a->rows - 1) + LG_SPLIT_KEYS - 1) / LG_SPLIT_KEYS;
}

/* The keys [*begin, *end) of the tile at `start` that the rows see; whether there are any. */
static int seen_keys(const lg_attention *a, int64_t start, int64_t *begin, int64_t *end) {
    const int64_t first = first_key(a, 0), last = end_key(a, a->rows - 1);
    *begin = first > start ? first : start;
    *end = last < start + TILE_KEYS ? last : start + TILE_KEYS;
    return *begin < *end;
}

/* Which rows of the pages the keys [begin, end) of the tile at `start` are; -1 for others. */
static void find_keys(const lg_attention *a, int64_t start, int64_t begin, int64_t end,
                      int64_t *places) {
    for (int64_t i = 0; i < TILE_KEYS; i++) places[i] = -1;
    for (int64_t position = begin; position < end;) {
        const int64_t within = position % a->block_size;
        const int64_t slot = a->blocks[position / a->block_size] * a->block_size + within;
        int64_t stop = position + a->block_size - within;
        stop = stop < end ? stop : end;
        for (int64_t i = 0; position < stop; i++, position++)
            places[position - start] = (slot + i) * a->num_kv_heads + a->kv_head;
    }
}

/* Scales of the tile's keys; those of keys that are not read are 0: even a weight of 0 must not meet
 * a NaN that memory happened to hold. */
static void read_scales(const lg_attention *a, workspace *w) {
    for (int64_t i = 0; i < TILE_KEYS; i++) {
        const int64_t place = w->tile.places[i], ahead = w->tile.ahead[i];
        w->k_scale[i] = place < 0 ? 0.0f : a->k_scale[place];
        w->v_scale[i] = place < 0 ? 0.0f : a->v_scale[place];
        fetch_ahead((const char *)(a->k_scale + ahead));
        fetch_ahead((const char *)(a->v_scale + ahead));
    }
}

LG_INLINE void pack_as(int dtype, int pairs, const lg_attention *a, workspace *w, int64_t begin,
                       int64_t end) {
    if (end - begin == TILE_KEYS)
        lg_pack_keys(dtype, pairs, 1, a->k, &w->tile, a->head_dim, w->keys);
    else
        lg_pack_keys(dtype, pairs, 0, a->k, &w->tile, a->head_dim, w->keys);
    lg_pack_values(dtype, pairs, a->v, &w->tile, begin & ~1, (end + 1) & ~1, a->head_dim,
                   a->width, w->values);
}

static void pack(const lg_attention *a, workspace *w, int64_t begin, int64_t end) {
    switch (a->dtype) {
    case LG_KV_F32: pack_as(LG_KV_F32, 0, a, w, begin, end); break;
    case LG_KV_BF16: pack_as(LG_KV_BF16, HAS_PAIRS, a, w, begin, end); break;
    case LG_KV_F16: pack_as(LG_KV_F16, 0, a, w, begin, end); break;
    case LG_KV_INT8: pack_as(LG_KV_INT8, HAS_PAIRS, a, w, begin, end); break;
    default: pack_as(LG_KV_FP8, HAS_PAIRS, a, w, begin, end);
    }
}

#define PRODUCT(R, V)                                                                          \
    case (R) * 8 + (V):                                                                        \
        block_product(R, V, pairs, depth, x, x_stride, y, y_stride, scale, c, c_stride);       \
        break;
#if BLOCK_VECTORS == 4
#define PRODUCTS(R) PRODUCT(R, 1) PRODUCT(R, 2) PRODUCT(R, 3) PRODUCT(R, 4)
#else
#define PRODUCTS(R) PRODUCT(R, 1)
#endif
#define ALL_PRODUCTS \
    PRODUCTS(1) PRODUCTS(2) PRODUCTS(3) PRODUCTS(4) PRODUCTS(5) PRODUCTS(6)

/* c[rows][16 vectors], however many vectors. */
LG_INLINE void product(int64_t rows, int64_t vectors, int pairs, int64_t depth, const uint32_t *x,
                       int64_t x_stride, const uint32_t *y, int64_t y_stride, const float *scale,
                       float *c, int64_t c_stride) {
    for (; vectors > 0; vectors -= BLOCK_VECTORS) {
        switch (rows * 8 + (vectors < BLOCK_VECTORS ? vectors : BLOCK_VECTORS)) {
            ALL_PRODUCTS
        default: __builtin_unreachable();
        }
        y += BLOCK_VECTORS * LG_LANES;
        c += BLOCK_VECTORS * LG_LANES;
    }
}

static void product_floats(int64_t rows, int64_t vectors, int64_t depth, const uint32_t *x,
                           int64_t x_stride, const uint32_t *y, int64_t y_stride,
                           const float *scale, float *c, int64_t c_stride) {
    product(rows, vectors, 0, depth, x, x_stride, y, y_stride, scale, c, c_stride);
}

static void product_pairs(int64_t rows, int64_t vectors, int64_t depth, const uint32_t *x,
                          int64_t x_stride, const uint32_t *y, int64_t y_stride,
                          const float *scale, float *c, int64_t c_stride) {
    product(rows, vectors, 1, depth, x, x_stride, y, y_stride, scale, c, c_stride);
}

static const int32_t key_numbers[TILE_KEYS] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

static int32_t within_tile(int64_t key) {
    return (int32_t)(key < 0 ? 0 : key > TILE_KEYS ? TILE_KEYS : key);
}

/* The largest score of a row. Scores that the row does not see, and scaled ones, are written back;
 * `begin` and `end` of the `keys` looked at are seen. */
LG_INLINE float largest_score(int scaled, int partly, const workspace *w, float *scores,
                              int64_t keys, int32_t begin, int32_t end) {
    lg_register most = lg_spread(NO_SCORE);
#pragma GCC unroll 4
    for (int64_t i = 0; i < keys; i += REGISTER_LANES) {
        lg_register s = lg_load_register(scores + i);
        if (scaled) s *= lg_load_register(w->k_scale + i);
        if (partly) {
            lg_register_mask place;
            memcpy(&place, key_numbers + i, sizeof place);
            s = lg_choose((place >= begin) & (place < end), s, lg_spread(-INFINITY));
        }
        if (scaled || partly) lg_store_register(scores + i, s);
        most = lg_larger(s, most);
    }
    return lg_largest_lane(most);
}

/* Scores to weights 2^(score - max); `lanes` *= decay, += the weights. */
LG_INLINE void weigh_row(int paired, int scaled, const workspace *w, const float *scores,
                         int64_t keys, float max, float decay, float *lanes, uint32_t *weights) {
    enum { STEP = REGISTER_LANES, PARTS = LG_LANES / STEP };
    lg_register mass[PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++)
        mass[part] = lg_load_register(lanes + part * STEP) * decay;
#pragma GCC unroll 4
    for (int64_t i = 0; i < keys; i += LG_LANES)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            const int64_t key = i + part * STEP;
            lg_register p = lg_exp2(lg_load_register(scores + key) - max);
            mass[part] += p;
            if (scaled) p *= lg_load_register(w->v_scale + key);
#if HAS_PAIRS
            if (paired)
                lg_store_pairs(weights + key / 2, p);
            else
#endif
                lg_store_register((float *)weights + key, p);
        }
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) lg_store_register(lanes + part * STEP, mass[part]);
}

/* Scores of a block of rows to weights; updates their maxima and masses and gives in `decay` what the sums
 * so far are worth now. `keys` are looked at; lanes that a row does not see get weight 0. */
LG_INLINE void weigh(int paired, int scaled, const lg_attention *a, workspace *w, int64_t start,
                     int64_t row, int64_t rows, int64_t keys, float *max, float *decay) {
    float before[LG_LANES] = {}, now[LG_LANES] = {};
    const int whole = first_key(a, row + rows - 1) <= start && end_key(a, row) >= start + TILE_KEYS;
    for (int64_t r = 0; r < rows; r++) {
        float *scores = w->scores + r * TILE_KEYS;
        float found;
        if (whole) {
            found = largest_score(scaled, 0, w, scores, TILE_KEYS, 0, TILE_KEYS);
        } else {
            const int32_t begin = within_tile(first_key(a, row + r) - start);
            const int32_t end = within_tile(end_key(a, row + r) - start);
            found = largest_score(scaled, 1, w, scores, keys, begin, end);
        }
        before[r] = max[r];
        now[r] = max[r] = found > max[r] ? found : max[r];
    }
    for (int64_t r = 0; r < rows; r += REGISTER_LANES)
        lg_store_register(decay + r,
                          lg_exp2(lg_load_register(before + r) - lg_load_register(now + r)));
    for (int64_t r = 0; r < rows; r++) {
        const float *scores = w->scores + r * TILE_KEYS;
        float *lanes = w->lanes + (row + r) * LG_LANES;
        uint32_t *weights = w->weights + r * TILE_KEYS;
        if (whole)
            weigh_row(paired, scaled, w, scores, TILE_KEYS, now[r], decay[r], lanes, weights);
        else
            weigh_row(paired, scaled, w, scores, keys, now[r], decay[r], lanes,
                      weights);
    }
}

#define DEFINE_WEIGH(NAME, PAIRED, SCALED)                                                     \
    static void NAME(const lg_attention *a, workspace *w, int64_t start, int64_t row,          \
                     int64_t rows, int64_t keys, float *max, float *decay) {            \
        weigh(PAIRED, SCALED, a, w, start, row, rows, keys, max, decay);                       \
    }
DEFINE_WEIGH(weigh_floats, 0, 0)
DEFINE_WEIGH(weigh_pairs, 1, 0)
DEFINE_WEIGH(weigh_scaled_floats, 0, 1)
DEFINE_WEIGH(weigh_scaled_pairs, 1, 1)

/* One block of rows over the tile at `start`, of which `end` keys are packed. */
static void attend_block(const lg_attention *a, workspace *w, int64_t start, int64_t row,
                         int64_t rows, lg_partial out) {
    const int64_t begin = within_tile(first_key(a, row) - start);
    const int64_t end = within_tile(end_key(a, row + rows - 1) - start);
    if (begin >= end) return;
    const int paired = is_paired(a->dtype);
    const int64_t depth = paired ? a->head_dim / 2 : a->head_dim;
    const int64_t vectors = (end + LG_LANES - 1) / LG_LANES;
    float decay[LG_LANES];
    (paired ? product_pairs : product_floats)(rows, vectors, depth, a->q + row * depth, depth,
                                              w->keys, TILE_KEYS, NULL, w->scores, TILE_KEYS);
    (a->k_scale == NULL ? paired ? weigh_pairs : weigh_floats
                        : paired ? weigh_scaled_pairs : weigh_scaled_floats)(
        a, w, start, row, rows, vectors * LG_LANES, out.max + row, decay);
    const int64_t step = paired ? 2 : 1, first = begin / step;
    (paired ? product_pairs : product_floats)(
        rows, a->width / LG_LANES, (end + step - 1) / step - first, w->weights + first, TILE_KEYS,
        w->values + first * a->width, a->width, decay, out.sum + row * a->width, a->width);
}

#if HAS_PAIRS
/* As pack and attend_block of at most BLOCK_ROWS rows that are all of `a`. */
static void attend_few(const lg_attention *a, workspace *w, int64_t start, int64_t begin,
                       int64_t end, lg_partial out) {
    const int64_t keys = lg_round_up(end, LG_LANES);
    float decay[LG_LANES];
    few_rows rows;
    place_few(a->k, a->v, a->head_dim * lg_kv_bytes(a->dtype), &w->tile, &rows);
    switch (a->dtype * 8 + a->rows) {
#define SCORES(DTYPE, ROWS)                                                                    \
    case DTYPE * 8 + ROWS:                                                                     \
        few_scores(DTYPE, ROWS, &rows, keys, a->head_dim, a->q, w->scores);                    \
        break;
        FEW_CASES(SCORES)
    default: __builtin_unreachable();
    }
    (a->k_scale == NULL ? weigh_pairs : weigh_scaled_pairs)(a, w, start, 0, a->rows, keys, out.max,
                                                            decay);
    switch (a->dtype * 8 + a->rows) {
#define VALUES(DTYPE, ROWS)                                                                    \
    case DTYPE * 8 + ROWS:                                                                     \
        few_values(DTYPE, ROWS, &rows, begin & ~1, end, a->head_dim, a->width,                 \
                   w->weights, decay, out.sum);                                                \
        break;
        FEW_CASES(VALUES)
    default: __builtin_unreachable();
    }
}
#endif

/* Rows number 64 `step` ... 64 (step + 1) of those that `next` begins with; 0 beyond its end. */
static void look_ahead(const lg_upcoming *next, int64_t step, int64_t *ahead) {
    memset(ahead, 0, TILE_KEYS * sizeof *ahead);
    if (next == NULL) return;
    const lg_attention *a = &next->task;
    const int64_t begin = next->split * LG_SPLIT_KEYS, last = end_key(a, a->rows - 1);
    const int64_t end = last < begin + LG_SPLIT_KEYS ? last : begin + LG_SPLIT_KEYS;
    const int64_t seen = first_key(a, 0) > begin ? first_key(a, 0) : begin;
    for (int64_t i = 0, position = seen + step * TILE_KEYS; i < TILE_KEYS && position < end;) {
        const int64_t within = position % a->block_size;
        const int64_t slot = a->blocks[position / a->block_size] * a->block_size + within;
        int64_t run = a->block_size - within;
        run = run < end - position ? run : end - position;
        run = run < TILE_KEYS - i ? run : TILE_KEYS - i;
        for (int64_t j = 0; j < run; j++)
            ahead[i + j] = (slot + j) * a->num_kv_heads + a->kv_head;
        i += run;
        position += run;
    }
}

void lg_fetch_split(const lg_upcoming *next) {
    const lg_attention *a = &next->task;
    const int64_t row_bytes = a->head_dim * lg_kv_bytes(a->dtype);
    int64_t ahead[TILE_KEYS];
    for (int64_t step = 0; step < LG_SPLIT_KEYS / TILE_KEYS; step++) {
        look_ahead(next, step, ahead);
        for (int64_t i = 0; i < TILE_KEYS; i++)
            for (int64_t line = 0; line < row_bytes; line += 64) {
                fetch_ahead(a->k + ahead[i] * row_bytes + line);
                fetch_ahead(a->v + ahead[i] * row_bytes + line);
            }
    }
}

void lg_attend_split(const lg_attention *a, int64_t split, const lg_upcoming *next, lg_partial out,
                     void *scratch) {
    workspace *w = divide(scratch, a->rows, a->head_dim);
    const int64_t split_end = (split + 1) * LG_SPLIT_KEYS;
    for (int64_t i = 0; i < a->rows; i++) out.max[i] = NO_SCORE;
    memset(out.sum, 0, (size_t)(a->rows * a->width) * sizeof(float));
    memset(w->lanes, 0, (size_t)(a->rows * LG_LANES) * sizeof(float));
    int64_t step = 0;
    for (int64_t start = split * LG_SPLIT_KEYS; start < split_end; start += TILE_KEYS) {
        int64_t begin, end;
        if (!seen_keys(a, start, &begin, &end)) continue;
        find_keys(a, start, begin, end, w->tile.places);
        look_ahead(next, step++, w->tile.ahead);
        if (a->k_scale != NULL) read_scales(a, w);
#if HAS_PAIRS
        /* One row alone asks for memory so quickly that requests are lost: up to 8 % slower. */
        if (is_paired(a->dtype) && a->rows > 1 && a->rows <= BLOCK_ROWS &&
            a->head_dim * lg_kv_bytes(a->dtype) <= MOST_ROW_BYTES) {
            attend_few(a, w, start, begin - start, end - start, out);
            continue;
        }
#endif
        pack(a, w, begin - start, end - start);
        for (int64_t row = 0; row < a->rows; row += BLOCK_ROWS)
            attend_block(a, w, start, row, a->rows - row < BLOCK_ROWS ? a->rows - row : BLOCK_ROWS,
                         out);
    }
    for (int64_t i = 0; i < a->rows; i++) out.mass[i] = lg_sum(lg_load(w->lanes + i * LG_LANES));
}

void lg_merge_split(lg_partial into, lg_partial from, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float a = into.max[row], b = from.max[row], max = a > b ? a : b;
        lg_register both = {a - max, b - max};
        both = lg_exp2(both);
        into.max[row] = max;
        const lg_register old = lg_spread(both[0]), new = lg_spread(both[1]);
        into.mass[row] = lg_fma(old, lg_spread(into.mass[row]), new * from.mass[row])[0];
        for (int64_t d = 0; d < width; d += REGISTER_LANES) {
            float *sum = into.sum + row * width + d;
            const lg_register more = new * lg_load_register(from.sum + row * width + d);
            lg_store_register(sum, lg_fma(old, lg_load_register(sum), more));
        }
    }
}
