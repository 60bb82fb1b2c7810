/* attention_split: softmax(q K^T) V of some query rows over one split of the keys, and the merge of
 * splits. Decode and prefill both are sequences of these two, so a token's bits are the same in
 * either, whatever runs beside it. */
#ifndef LEGATO_ATTENTION_SPLIT_H
#define LEGATO_ATTENTION_SPLIT_H

#include <stdint.h>

/* Keys of a split: [256 j, 256 (j + 1)), whatever the context. */
#define LG_SPLIT_KEYS 256

/* One KV head of one sequence, and the query rows that read it: row i is head i % group of the
 * token at position first_position + i / group. */
typedef struct {
    int dtype;
    int64_t head_dim, width; /* width: head_dim up to a multiple of 16 */
    int64_t num_kv_heads, kv_head, block_size, window; /* window 0: all keys before */
    const char *k, *v;
    const float *k_scale, *v_scale; /* NULL for float dtypes */
    const int32_t *blocks;
    float scale; /* of the scores, to base 2 */
    int64_t rows, group, first_position;
    const uint32_t *q; /* [rows][depth], as lg_gather_queries left it */
} lg_attention;

/* Of `rows` query rows: the largest score (to base 2), the sum of the weights 2^(score - max), and
 * the weighted sum of V. */
typedef struct {
    float *max;  /* [rows] */
    float *mass; /* [rows] */
    float *sum;  /* [rows][width] */
} lg_partial;

/* Floats that hold a partial, and the partial in them. */
int64_t lg_partial_floats(int64_t rows, int64_t width);
lg_partial lg_partial_at(float *memory, int64_t rows, int64_t width);

/* Bytes that lg_attend_split and lg_gather_queries need besides. */
int64_t lg_attention_scratch(int64_t rows, int64_t head_dim);

/* Rows of queries in the form that the products want; q: the first row's token, heads of the group
 * side by side. Sets a->q to memory in `scratch`. */
void lg_gather_queries(lg_attention *a, const float *q, int64_t token_stride, void *scratch);

/* What a thread will most likely do next. */
typedef struct {
    lg_attention task; /* `q` need not be set */
    int64_t split;
} lg_upcoming;

/* Fetches all its rows into the cache. */
void lg_fetch_split(const lg_upcoming *next);

/* Split `split` into `out`. Meanwhile the rows of `next` are fetched, as many as there are in this
 * split; NULL: none. */
void lg_attend_split(const lg_attention *a, int64_t split, const lg_upcoming *next, lg_partial out,
                     void *scratch);

/* into = into and from; in the order of the splits. */
void lg_merge_split(lg_partial into, lg_partial from, int64_t rows, int64_t width);

/* The splits of the keys that the rows see are [lg_first_split, lg_end_split). */
int64_t lg_first_split(const lg_attention *a);
int64_t lg_end_split(const lg_attention *a);

#endif
