/* attention: paged decode and prefill. Tasks go to whoever is free; what a task computes depends on
 * its own sequence alone. Everything about contexts is read from tensors when the operation runs. */
#include <math.h>

#include "attention_split.h"
#include "kv_rows.h"
#include "op.h"

/* Partials beyond this are not kept: a task then takes all splits of its rows in turn. */
#define MOST_PARTIAL_BYTES (16 << 20)
/* Query rows of a prefill task: enough that packing a tile of keys costs little beside them. */
#define PREFILL_ROWS 256
#define MOST_PREFILL_TOKENS 128

enum { N_SEQUENCES, N_HEADS, N_KV_HEADS, N_HEAD_DIM, N_DTYPE, N_BLOCK_SIZE, N_TABLE_STRIDE,
       N_Q_STRIDE, N_WINDOW };
enum { P_Q, P_K, P_V, P_K_SCALE, P_V_SCALE, P_CONTEXT_LENS, P_BLOCK_TABLE, P_OUT, P_QUERY_STARTS };

LG_INLINE int64_t context_len(const lg_op *op, int64_t s) {
    return ((const int32_t *)op->p[P_CONTEXT_LENS])[s];
}

/* One KV head of sequence s for the `tokens` queries from `position` on. */
static lg_attention describe(const lg_op *op, int64_t s, int64_t kv_head, int64_t position,
                             int64_t tokens) {
    const int64_t group = op->n[N_HEADS] / op->n[N_KV_HEADS];
    return (lg_attention){
        .dtype = (int)op->n[N_DTYPE],
        .head_dim = op->n[N_HEAD_DIM],
        .width = (op->n[N_HEAD_DIM] + LG_LANES - 1) / LG_LANES * LG_LANES,
        .num_kv_heads = op->n[N_KV_HEADS],
        .kv_head = kv_head,
        .block_size = op->n[N_BLOCK_SIZE],
        .window = op->n[N_WINDOW],
        .k = op->p[P_K],
        .v = op->p[P_V],
        .k_scale = op->p[P_K_SCALE],
        .v_scale = op->p[P_V_SCALE],
        .blocks = (const int32_t *)op->p[P_BLOCK_TABLE] + s * op->n[N_TABLE_STRIDE],
        .scale = (float)(op->f[0] * 1.4426950408889634),
        .rows = tokens * group,
        .group = group,
        .first_position = position,
    };
}

/* out = sum / mass for the rows of `a`, whose first token is number `token` of the batch. Returns
 * whether all of it is finite. */
static int finish(const lg_op *op, const lg_attention *a, lg_partial done, int64_t token) {
    lg_f32x16 zeros = {};
    for (int64_t i = 0; i < a->rows; i++) {
        const int64_t head = a->kv_head * a->group + i % a->group;
        float *out = (float *)op->p[P_OUT] +
                     ((token + i / a->group) * op->n[N_HEADS] + head) * a->head_dim;
        const float inverse = 1.0f / done.mass[i];
        for (int64_t d = 0; d < a->head_dim; d += LG_LANES) {
            const lg_f32x16 v = lg_load(done.sum + i * a->width + d) * inverse;
            lg_store_n(out + d, v, a->head_dim - d);
            zeros += v * 0.0f;
        }
    }
    return lg_sum(zeros) == 0.0f;
}

/* The memory of a thread that takes tasks of up to `rows` query rows. */
typedef struct {
    float *partials[2];
    void *rest;
} task_memory;

static task_memory reserve(lg_team *team, int64_t rows, int64_t head_dim) {
    const int64_t width = (head_dim + LG_LANES - 1) / LG_LANES * LG_LANES;
    const int64_t partial = (lg_partial_floats(rows, width) * 4 + 63) / 64 * 64;
    char *memory = lg_scratch(team, (size_t)(2 * partial + lg_attention_scratch(rows, head_dim)));
    return (task_memory){{(float *)memory, (float *)(memory + partial)}, memory + 2 * partial};
}

static void gather(const lg_op *op, lg_attention *a, int64_t token, task_memory memory) {
    const float *q = (const float *)op->p[P_Q] + token * op->n[N_Q_STRIDE];
    lg_gather_queries(a, q + a->kv_head * a->group * a->head_dim, op->n[N_Q_STRIDE], memory.rest);
}

/* All splits of the rows of `a`, in order. Returns whether the result is finite. */
static int attend(const lg_op *op, lg_attention *a, int64_t token, task_memory memory) {
    lg_partial all = lg_partial_at(memory.partials[0], a->rows, a->width);
    lg_partial one = lg_partial_at(memory.partials[1], a->rows, a->width);
    const int64_t first = lg_first_split(a), end = lg_end_split(a);
    gather(op, a, token, memory);
    for (int64_t split = first; split < end; split++) {
        const lg_upcoming next = {*a, split + 1};
        lg_attend_split(a, split, split + 1 < end ? &next : NULL, split == first ? all : one,
                        memory.rest);
        if (split > first) lg_merge_split(all, one, a->rows, a->width);
    }
    return finish(op, a, all, token);
}

LG_INLINE int64_t num_splits(const lg_op *op, int64_t s) {
    const int64_t length = context_len(op, s), window = op->n[N_WINDOW];
    const int64_t first = window == 0 || length < window ? 0 : length - window;
    return (length + LG_SPLIT_KEYS - 1) / LG_SPLIT_KEYS - first / LG_SPLIT_KEYS;
}

/* A row of the batch that stands for no sequence. */
static void clear(const lg_op *op, int64_t s) {
    const int64_t width = op->n[N_HEADS] * op->n[N_HEAD_DIM];
    memset((float *)op->p[P_OUT] + s * width, 0, (size_t)width * sizeof(float));
}

/* Finds tasks (sequence, split, KV head), given in rising order. Neighbouring KV heads lie side by
 * side, but a task of several, which reads whole rows, was up to 15 % slower: with what it fetches
 * for the next one it does not fit well into the second-level cache. */
typedef struct {
    int64_t s, before, splits; /* `before`: splits of the sequences before s */
} cursor;

static lg_upcoming locate(const lg_op *op, cursor *c, int64_t task) {
    const int64_t kv_heads = op->n[N_KV_HEADS], split = task / kv_heads;
    while (split - c->before >= (c->splits = num_splits(op, c->s))) {
        c->before += c->splits;
        c->s++;
    }
    lg_attention a = describe(op, c->s, task % kv_heads, context_len(op, c->s) - 1, 1);
    return (lg_upcoming){a, lg_first_split(&a) + split - c->before};
}

/* The partials [splits of all sequences][KV heads] to `partials`; a split that is alone is brought to
 * its end at once. */
static void decode_splits(const lg_op *op, lg_team *team, task_memory memory, float *partials,
                          int64_t total_splits) {
    const int64_t total = total_splits * op->n[N_KV_HEADS];
    cursor here = {}, there = {};
    int fetched = 0;
    for (int64_t task; (task = lg_take(team, 0, total)) >= 0; fetched = 1) {
        lg_upcoming now = locate(op, &here, task), next;
        if (!fetched) lg_fetch_split(&now);
        const int more = task + team->size < total;
        if (more) next = locate(op, &there, task + team->size);
        lg_attention *a = &now.task;
        float *place = here.splits == 1
                           ? memory.partials[0]
                           : partials + task * lg_partial_floats(a->rows, a->width);
        const lg_partial out = lg_partial_at(place, a->rows, a->width);
        gather(op, a, here.s, memory);
        lg_attend_split(a, now.split, more ? &next : NULL, out, memory.rest);
        if (here.splits == 1) finish(op, a, out, here.s);
    }
}

/* Tasks (sequence, KV head): puts the partials of its splits together, in their order. */
static void decode_merge(const lg_op *op, lg_team *team, float *partials) {
    const int64_t kv_heads = op->n[N_KV_HEADS], group = op->n[N_HEADS] / kv_heads;
    int64_t s = 0, before = 0;
    for (int64_t task; (task = lg_take(team, 1, op->n[N_SEQUENCES] * kv_heads)) >= 0;) {
        const int64_t head = task % kv_heads;
        for (; s < task / kv_heads; s++) before += num_splits(op, s);
        const int64_t splits = num_splits(op, s);
        if (splits < 2) {
            if (splits == 0 && head == 0) clear(op, s);
            continue;
        }
        lg_attention a = describe(op, s, head, context_len(op, s) - 1, 1);
        const int64_t floats = lg_partial_floats(group, a.width);
        float *first = partials + (before * kv_heads + head) * floats;
        lg_partial all = lg_partial_at(first, group, a.width);
        for (int64_t i = 1; i < splits; i++)
            lg_merge_split(all, lg_partial_at(first + i * kv_heads * floats, group, a.width), group,
                           a.width);
        finish(op, &a, all, s);
    }
}

/* One query a sequence. n: sequences, heads, KV heads, head_dim, dtype of the pages, block size,
 * stride of the block table, stride of a token in q, window (0: none); f: scale; p: q, pages of K
 * and of V, their scales or NULL, context_lens and block_table int32, out. */
LG_API void lg_paged_decode(const lg_op *op, lg_team *team) {
    const int64_t kv_heads = op->n[N_KV_HEADS], group = op->n[N_HEADS] / kv_heads;
    const int64_t width = (op->n[N_HEAD_DIM] + LG_LANES - 1) / LG_LANES * LG_LANES;
    int64_t total = 0, most = 0;
    for (int64_t s = 0; s < op->n[N_SEQUENCES]; s++) {
        const int64_t splits = num_splits(op, s);
        total += splits;
        most = splits > most ? splits : most;
    }
    const int64_t bytes = total * kv_heads * lg_partial_floats(group, width) * 4;
    task_memory memory = reserve(team, group, op->n[N_HEAD_DIM]);
    if (bytes <= MOST_PARTIAL_BYTES) {
        float *partials = most > 1 ? lg_team_scratch(team, (size_t)bytes) : NULL;
        decode_splits(op, team, memory, partials, total);
        if (most > 1) lg_barrier(team);
        decode_merge(op, team, partials);
        return;
    }
    for (int64_t task; (task = lg_take(team, 0, op->n[N_SEQUENCES] * kv_heads)) >= 0;) {
        const int64_t s = task / kv_heads;
        lg_attention a = describe(op, s, task % kv_heads, context_len(op, s) - 1, 1);
        if (context_len(op, s) > 0)
            attend(op, &a, s, memory);
        else
            clear(op, s);
    }
}

/* As lg_paged_decode, with queries query_starts[s] ... query_starts[s + 1], the last ones of their
 * context; p: and query_starts int32 at the end. */
LG_API void lg_paged_prefill(const lg_op *op, lg_team *team) {
    const int64_t sequences = op->n[N_SEQUENCES], kv_heads = op->n[N_KV_HEADS];
    const int64_t group = op->n[N_HEADS] / kv_heads;
    const int32_t *starts = op->p[P_QUERY_STARTS];
    int64_t tile = PREFILL_ROWS / group;
    tile = tile < 1 ? 1 : tile > MOST_PREFILL_TOKENS ? MOST_PREFILL_TOKENS : tile;
    int64_t total = 0;
    for (int64_t s = 0; s < sequences; s++)
        total += (starts[s + 1] - starts[s] + tile - 1) / tile * kv_heads;
    task_memory memory = reserve(team, tile * group, op->n[N_HEAD_DIM]);
    int64_t s = 0, before = 0;
    for (int64_t task; (task = lg_take(team, 0, total)) >= 0;) {
        int64_t tiles;
        while (task - before >= (tiles = (starts[s + 1] - starts[s] + tile - 1) / tile) * kv_heads) {
            before += tiles * kv_heads;
            s++;
        }
        /* The last tile sees the most keys: it goes first. */
        const int64_t first = (tiles - 1 - (task - before) / kv_heads) * tile;
        const int64_t queries = starts[s + 1] - starts[s];
        const int64_t tokens = queries - first < tile ? queries - first : tile;
        const int64_t head = (task - before) % kv_heads, at = context_len(op, s) - queries + first;
        lg_attention a = describe(op, s, head, at, tokens);
        if (attend(op, &a, starts[s] + first, memory)) continue;
        /* Tokens side by side give V that only some of them see a weight of 0, and 0 * NaN is NaN. */
        for (int64_t i = 0; i < tokens && tokens > 1; i++) {
            a = describe(op, s, head, at + i, 1);
            attend(op, &a, starts[s] + first + i, memory);
        }
    }
}
