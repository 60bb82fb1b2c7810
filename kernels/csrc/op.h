/* lg_op: one operation of a CPU program, and the team of threads that runs it. */
#ifndef LEGATO_OP_H
#define LEGATO_OP_H

#include <stddef.h>
#include <stdint.h>

#define LG_API __attribute__((visibility("default")))
#define LG_MAX_SIZES 16
#define LG_MAX_SCALARS 4
#define LG_MAX_POINTERS 14
#define LG_MAX_THREADS 64
#define LG_COUNTERS 4

typedef struct lg_team lg_team;
typedef struct lg_op lg_op;

/* Called by every thread of the team with its own rank. The runtime puts a barrier after it. */
typedef void (*lg_kernel)(const lg_op *op, lg_team *team);

struct lg_op {
    lg_kernel run;
    int64_t n[LG_MAX_SIZES];
    double f[LG_MAX_SCALARS];
    void *p[LG_MAX_POINTERS];
};

struct lg_shared;

struct lg_team {
    int rank;
    int size;
    struct lg_shared *shared;
};

/* Waits until every thread of the team is here; what was written before is seen after. */
void lg_barrier(lg_team *team);

/* The next task of [0, total) for this thread, or -1: tasks go to whoever is free. `counter` in
 * [0, LG_COUNTERS) tells the phases of one operation apart; all are 0 when it starts. */
int64_t lg_take(lg_team *team, int counter, int64_t total);

/* The next task of [0, total) for this thread, or -1. Each thread has an even share, which it takes
 * from the front, in order; with that done it takes from the ends of the others' shares. Between two
 * barriers only one such set of tasks can be given out. */
int64_t lg_claim(lg_team *team, int64_t total);

/* This thread's even share [*begin, *end) of [0, total). */
void lg_share(const lg_team *team, int64_t total, int64_t *begin, int64_t *end);

/* Memory of this thread, 64-byte aligned, at least `bytes`; its contents last for one operation. */
void *lg_scratch(lg_team *team, size_t bytes);

/* Memory of the whole team, the same pointer for every thread; contains a barrier, so all call it. */
void *lg_team_scratch(lg_team *team, size_t bytes);

#endif
