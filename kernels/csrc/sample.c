/* sample: tokens from rows of logits, and changes to them; kernels/choose.py, draw_weights.py and
 * penalties.py define the results. */
#include "op.h"
#include "vec.h"

#include <float.h>

#define POINT 40
#define FRACTION_BITS 25
#define BLOCK 1024
#define BUCKETS 2048
#define DUMMIES 16

/* The lowest id of the largest logit; -1: there is NaN, or no finite maximum. */
static int64_t argmax_row(const float *x, int64_t n) {
    lg_f32x16 best = lg_splat(-INFINITY);
    lg_i32x16 nan = {};
    int64_t i = 0;
    for (; i + LG_LANES <= n; i += LG_LANES) {
        lg_f32x16 v = lg_load(x + i);
        nan |= v != v;
        best = lg_max(v, best);
    }
    float most = lg_max_lane(best);
    int broken = 0;
    for (int lane = 0; lane < LG_LANES; lane++) broken |= nan[lane];
    for (; i < n; i++) {
        broken |= x[i] != x[i];
        most = x[i] > most ? x[i] : most;
    }
    if (broken || !(most < INFINITY) || !(most > -INFINITY)) return -1;
    for (int64_t first = 0;; first += BLOCK) {
        const int64_t last = first + BLOCK < n ? first + BLOCK : n;
        int found = 0;
        for (int64_t j = first; j < last; j++) found |= x[j] == most;
        if (found)
            for (int64_t j = first;; j++)
                if (x[j] == most) return j;
    }
}

/* Only operations that contraction to fused multiply-add cannot touch: see draw_weights.py. */
static void weigh(const float *restrict x, int64_t n, float best, float temperature,
                  int64_t *restrict w) {
    for (int64_t i = 0; i < n; i++) {
        float quotient = (best - x[i]) / temperature;
        quotient = quotient < 43.0f ? quotient : 43.0f;
        const int32_t z = (int32_t)(quotient * 48408812.0f);
        const uint32_t fraction = (uint32_t)z & ((1u << FRACTION_BITS) - 1);
        uint32_t power = 234126;
        power = 2737501 - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        power = 20571132 - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        power = 119165493 - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        power = 515877902 - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        power = 1488521986 - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        power = (1u << 31) - (uint32_t)((uint64_t)power * fraction >> FRACTION_BITS);
        w[i] = (int64_t)((uint64_t)power << (POINT - 31) >> (z >> FRACTION_BITS));
    }
}

static int64_t sum(const int64_t *w, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) total += w[i];
    return total;
}

/* Unsigned, in the order of the logits; -0.0 equals 0.0. */
LG_INLINE uint32_t key_of(float logit) {
    const float x = logit + 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

/* Keeps the shortest best-first prefix whose amount (of tokens, or of weight) reaches `target`,
 * which all of them reach together; the weights of the others become 0. The logit at its end is
 * found digit by digit: 11, 11 and 10 bits of the key. */
LG_INLINE void keep_prefix(const float *restrict x, int64_t n, int64_t *restrict w, int64_t target,
                           int by_weight, int64_t *restrict amounts) {
    static const int shifts[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
    uint32_t end = 0; /* the digits found so far */
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level];
        const uint32_t mask = (1u << bits[level]) - 1;
        memset(amounts, 0, (BUCKETS + DUMMIES) * sizeof *amounts);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t key = key_of(x[i]);
            /* No branch: of those that fall elsewhere, several places take the amounts. */
            const int inside = level == 0 || key >> (shift + bits[level]) == end;
            const uint32_t place = inside ? key >> shift & mask : BUCKETS + (i & (DUMMIES - 1));
            amounts[place] += by_weight ? w[i] : 1;
        }
        uint32_t digit = mask;
        while (amounts[digit] < target) target -= amounts[digit--];
        end = end << bits[level] | digit;
    }
    const int64_t amount = amounts[end & ((1u << bits[2]) - 1)];
    int64_t each = 1; /* of the tokens at the end */
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = key_of(x[i]);
        if (by_weight && key == end) each = w[i] > 1 ? w[i] : each;
        w[i] = key >= end ? w[i] : 0;
    }
    int64_t kept = (target + each - 1) / each;
    if (amount <= kept * each) return;
    for (int64_t i = 0; i < n; i++)
        if (key_of(x[i]) == end && kept-- <= 0) w[i] = 0;
}

LG_INLINE uint64_t mix(uint64_t word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

/* See counter_rng.py. */
static double uniform(uint64_t seed, uint64_t index) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    const uint64_t word = mix(mix(seed + golden) + (index + 1) * golden);
    return (double)((word >> 11) + 1) / 9007199254740992.0;
}

static int64_t choose_row(const float *x, int64_t n, const double *reals, const int64_t *integers,
                          int64_t *w) {
    const int64_t most_likely = argmax_row(x, n);
    if (most_likely < 0 || reals[0] == 0.0) return most_likely;
    const double top_p = reals[1], min_p = reals[2];
    const int64_t top_k = integers[0];
    int64_t *amounts = w + n;
    weigh(x, n, x[most_likely], (float)reals[0], w);
    if (0 < top_k && top_k < n) keep_prefix(x, n, w, top_k, 0, amounts);
    if (top_p < 1.0) {
        const int64_t total = sum(w, n), target = (int64_t)ceil((double)total * top_p);
        if (target < total) keep_prefix(x, n, w, target, 1, amounts);
    }
    if (min_p > 0.0) {
        const int64_t least = (int64_t)ceil(min_p * (double)((int64_t)1 << POINT));
        for (int64_t i = 0; i < n; i++) w[i] = w[i] >= least ? w[i] : 0;
    }
    const int64_t total = sum(w, n);
    const double number = uniform((uint64_t)integers[1], (uint64_t)integers[2]);
    int64_t goal = (int64_t)ceil((double)total * number);
    goal = goal < total ? goal : total;
    for (int64_t first = 0;; first += BLOCK) {
        const int64_t block = sum(w + first, first + BLOCK < n ? BLOCK : n - first);
        if (block < goal) {
            goal -= block;
            continue;
        }
        for (int64_t i = first;; i++) {
            goal -= w[i];
            if (goal <= 0) return i;
        }
    }
}

/* n: rows, width, row stride; p: logits, out int64. */
LG_API void lg_argmax(const lg_op *op, lg_team *team) {
    for (int64_t r; (r = lg_take(team, 0, op->n[0])) >= 0;)
        ((int64_t *)op->p[1])[r] = argmax_row((const float *)op->p[0] + r * op->n[2], op->n[1]);
}

/* n: rows, width, row stride; p: logits, reals [rows, 3] double (temperature, top_p, min_p),
 * integers [rows, 3] int64 (top_k, seed, index), out int64. */
LG_API void lg_choose(const lg_op *op, lg_team *team) {
    const int64_t n = op->n[1];
    int64_t *scratch = lg_scratch(team, (size_t)(n + BUCKETS + DUMMIES) * sizeof(int64_t));
    for (int64_t r; (r = lg_take(team, 0, op->n[0])) >= 0;)
        ((int64_t *)op->p[3])[r] =
            choose_row((const float *)op->p[0] + r * op->n[2], n, (const double *)op->p[1] + r * 3,
                       (const int64_t *)op->p[2] + r * 3, scratch);
}

/* log(sum of e^(x - most)). */
static double log_sum_exp(const float *x, int64_t n, float most) {
    double total = 0.0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t last = first + BLOCK < n ? first + BLOCK : n;
        lg_f32x16 lanes = {};
        int64_t i = first;
        for (; i + LG_LANES <= last; i += LG_LANES) lanes += lg_exp(lg_load(x + i) - most);
        total += (double)lg_sum(lanes);
        for (; i < last; i++) total += exp((double)x[i] - (double)most);
    }
    return log(total);
}

/* The `count` <= n largest, best first, equal ones by lower id. */
static void best_of(const float *x, int64_t n, int64_t count, float *values, int64_t *ids) {
    int64_t filled = 0;
    for (int64_t i = 0; i < n; i++) {
        if (filled == count) {
            const float worst = values[count - 1];
            while (i + LG_LANES <= n) { /* most of the row is passed over here */
                lg_i32x16 better = lg_load(x + i) > worst;
                int any = 0;
                for (int lane = 0; lane < LG_LANES; lane++) any |= better[lane];
                if (any) break;
                i += LG_LANES;
            }
            while (i < n && !(x[i] > worst)) i++;
            if (i == n) return;
        }
        int64_t place = filled < count ? filled++ : count - 1;
        for (; place > 0 && x[i] > values[place - 1]; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = x[i];
        ids[place] = i;
    }
}

/* Logprobs of one token a row and of the best. n: rows, width, row stride, count; p: logits, tokens
 * int64 [rows], own float [rows], values float [rows, count], ids int64 [rows, count]. */
LG_API void lg_logprobs(const lg_op *op, lg_team *team) {
    const int64_t n = op->n[1], count = op->n[3];
    for (int64_t r; (r = lg_take(team, 0, op->n[0])) >= 0;) {
        const float *x = (const float *)op->p[0] + r * op->n[2];
        float *values = (float *)op->p[3] + r * count;
        float most = -INFINITY;
        for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
        const double log_sum = log_sum_exp(x, n, most);
        if (count > 0) best_of(x, n, count, values, (int64_t *)op->p[4] + r * count);
        for (int64_t i = 0; i < count; i++)
            values[i] = (float)((double)values[i] - (double)most - log_sum);
        const float own = x[((const int64_t *)op->p[1])[r]];
        ((float *)op->p[2])[r] = (float)((double)own - (double)most - log_sum);
    }
}

/* One logit's change: bias, repetition, amount to subtract; see penalties.py. */
static float changed(float before, const float *amounts) {
    const float biased = before + amounts[0];
    /* Volatile: the product is rounded before the subtraction, not fused with it. */
    const volatile float scaled = biased > 0.0f ? biased / amounts[1] : biased * amounts[1];
    const float value = scaled - amounts[2];
    if (!isfinite(before)) return value;
    return value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value;
}

/* Changes single logits of some rows. n: changed rows, width, row stride; p: logits, rows int64,
 * starts int64 [rows + 1, 2] of ids and of banned ids, ids int64, amounts [ids, 3], banned int64,
 * memory to work in: a float for each banned id. */
LG_API void lg_change_logits(const lg_op *op, lg_team *team) {
    const int64_t *ids = op->p[3], *banned = op->p[5];
    const float *amounts = op->p[4];
    float *saved = op->p[6];
    for (int64_t r; (r = lg_take(team, 0, op->n[0])) >= 0;) {
        const int64_t *starts = (const int64_t *)op->p[2] + r * 2;
        float *x = (float *)op->p[0] + ((const int64_t *)op->p[1])[r] * op->n[2];
        for (int64_t i = starts[0]; i < starts[2]; i++)
            x[ids[i]] = changed(x[ids[i]], amounts + i * 3);
        const int64_t first = starts[1], last = starts[3];
        if (first == last) continue;
        for (int64_t i = first; i < last; i++) saved[i] = x[banned[i]];
        for (int64_t i = first; i < last; i++) x[banned[i]] = -INFINITY;
        if (argmax_row(x, op->n[1]) >= 0) continue;
        for (int64_t i = first; i < last; i++) x[banned[i]] = saved[i];
    }
}
