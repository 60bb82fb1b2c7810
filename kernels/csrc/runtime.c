/* runtime: runs programs of operations on a pool of threads that sleep between programs. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"

#define CACHE_LINE 64
/* A thread waits this many polls at a barrier (some 20 us) before it gives its core away. */
#define SPINS_BEFORE_YIELD 4000

struct lg_shared {
    _Atomic int arrived __attribute__((aligned(CACHE_LINE)));
    _Atomic unsigned phase __attribute__((aligned(CACHE_LINE)));
    struct {
        _Atomic int64_t next __attribute__((aligned(CACHE_LINE)));
    } counters[LG_COUNTERS];
    struct {
        _Atomic uint64_t taken __attribute__((aligned(CACHE_LINE)));
    } shares[LG_MAX_THREADS];
    void *scratch[LG_MAX_THREADS + 1]; /* the last one is the team's */
    size_t scratch_bytes[LG_MAX_THREADS + 1];
};

typedef struct {
    const lg_op *ops;
    int64_t count;
    int size;
} job;

static struct lg_shared pool_shared;
static pthread_mutex_t pool_busy = PTHREAD_MUTEX_INITIALIZER; /* held while a program runs */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t pool_wake = PTHREAD_COND_INITIALIZER;
static int pool_threads; /* started; ranks 1 ... pool_threads */
static uint64_t pool_generation;
static job pool_job;

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void clear_counters(struct lg_shared *shared) {
    for (int c = 0; c < LG_COUNTERS; c++)
        atomic_store_explicit(&shared->counters[c].next, 0, memory_order_relaxed);
}

/* `ends_op`: every thread is past its last lg_take, so the counters start again. */
static void wait_for_all(lg_team *team, int ends_op) {
    struct lg_shared *shared = team->shared;
    unsigned phase = atomic_load_explicit(&shared->phase, memory_order_relaxed);
    if (team->size == 1) {
        if (ends_op) clear_counters(shared);
        atomic_store_explicit(&shared->phase, phase + 1, memory_order_relaxed);
        return;
    }
    if (atomic_fetch_add_explicit(&shared->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        if (ends_op) clear_counters(shared);
        atomic_store_explicit(&shared->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&shared->phase, phase + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&shared->phase, memory_order_acquire) == phase) {
        if (++spins < SPINS_BEFORE_YIELD)
            pause_cpu();
        else
            sched_yield();
    }
}

void lg_barrier(lg_team *team) { wait_for_all(team, 0); }

int64_t lg_take(lg_team *team, int counter, int64_t total) {
    int64_t task = atomic_fetch_add_explicit(&team->shared->counters[counter].next, 1,
                                             memory_order_relaxed);
    return task < total ? task : -1;
}

/* One task of a share of `count`; -1: all are taken. `taken` is the phase (32 bits), how many went at
 * the end (16) and at the front (16); with another phase than now it says that none did. */
static int64_t claim_one(_Atomic uint64_t *taken, unsigned phase, int64_t count, int at_end) {
    uint64_t before = atomic_load_explicit(taken, memory_order_relaxed);
    for (;;) {
        const uint64_t now = before >> 32 == phase ? before : (uint64_t)phase << 32;
        const int64_t front = now & 0xffff, end = now >> 16 & 0xffff;
        if (front + end >= count) return -1;
        if (atomic_compare_exchange_weak_explicit(taken, &before, now + (at_end ? 1 << 16 : 1),
                                                  memory_order_relaxed, memory_order_relaxed))
            return at_end ? count - 1 - end : front;
    }
}

int64_t lg_claim(lg_team *team, int64_t total) {
    struct lg_shared *shared = team->shared;
    const unsigned phase = atomic_load_explicit(&shared->phase, memory_order_relaxed);
    for (int i = 0; i < team->size; i++) {
        const int owner = (team->rank + i) % team->size;
        const int64_t begin = total * owner / team->size, end = total * (owner + 1) / team->size;
        const int64_t task = claim_one(&shared->shares[owner].taken, phase, end - begin, i > 0);
        if (task >= 0) return begin + task;
    }
    return -1;
}

void lg_share(const lg_team *team, int64_t total, int64_t *begin, int64_t *end) {
    /* Rounded up: the caller's own thread, rank 0, has its share first. */
    *begin = (total * team->rank + team->size - 1) / team->size;
    *end = (total * (team->rank + 1) + team->size - 1) / team->size;
}

static void *grow(struct lg_shared *shared, int place, size_t bytes) {
    if (shared->scratch_bytes[place] < bytes) {
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        free(shared->scratch[place]);
        shared->scratch[place] = aligned_alloc(4096, rounded);
        if (shared->scratch[place] == NULL) abort(); /* nothing sensible is left to do */
        shared->scratch_bytes[place] = rounded;
    }
    return shared->scratch[place];
}

void *lg_scratch(lg_team *team, size_t bytes) { return grow(team->shared, team->rank, bytes); }

void *lg_team_scratch(lg_team *team, size_t bytes) {
    if (team->rank == 0) grow(team->shared, LG_MAX_THREADS, bytes);
    lg_barrier(team);
    return team->shared->scratch[LG_MAX_THREADS];
}

static void run_ops(const lg_op *ops, int64_t count, lg_team *team) {
    for (int64_t i = 0; i < count; i++) {
        ops[i].run(&ops[i], team);
        wait_for_all(team, 1);
    }
}

static void *pool_main(void *argument) {
    int rank = (int)(intptr_t)argument;
    uint64_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool_lock);
        while (pool_generation == seen) pthread_cond_wait(&pool_wake, &pool_lock);
        seen = pool_generation;
        job mine = pool_job;
        pthread_mutex_unlock(&pool_lock);
        if (rank >= mine.size) continue;
        lg_team team = {rank, mine.size, &pool_shared};
        run_ops(mine.ops, mine.count, &team);
    }
    return NULL;
}

/* Starts threads up to `wanted`; returns how many there are. Called with the lock, just before a job
 * is posted: the first job that a new thread sees is that one. */
static int start_threads(int wanted) {
    while (pool_threads < wanted) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, pool_main,
                                    (void *)(intptr_t)(pool_threads + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool_threads++;
    }
    return pool_threads;
}

/* fork() copies this memory, but of the threads only the one that called it: the child begins without
 * a team, and with nobody who would unlock what another thread held or finish what it was at. */
static void begin_as_child(void) {
    pthread_mutex_init(&pool_busy, NULL);
    pthread_mutex_init(&pool_lock, NULL);
    pthread_cond_init(&pool_wake, NULL);
    pool_threads = 0;
    /* Scratch memory may have been at its growing: what is there is given up. */
    memset(&pool_shared, 0, sizeof pool_shared);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, begin_as_child);
}

/* Runs `count` operations in order on up to `num_threads` threads, this one included. While
 * another thread's program has the pool, the caller runs its own program alone. */
LG_API void lg_run(const lg_op *ops, int64_t count, int num_threads) {
    if (num_threads > LG_MAX_THREADS) num_threads = LG_MAX_THREADS;
    if (num_threads < 2 || pthread_mutex_trylock(&pool_busy) != 0) {
        static _Thread_local struct lg_shared alone;
        lg_team team = {0, 1, &alone};
        run_ops(ops, count, &team);
        return;
    }
    pthread_mutex_lock(&pool_lock);
    int size = start_threads(num_threads - 1) + 1;
    if (size > num_threads) size = num_threads;
    pool_job = (job){ops, count, size};
    pool_generation++;
    pthread_cond_broadcast(&pool_wake);
    pthread_mutex_unlock(&pool_lock);
    lg_team team = {0, size, &pool_shared};
    run_ops(ops, count, &team);
    pthread_mutex_unlock(&pool_busy);
}

LG_API int64_t lg_op_size(void) { return (int64_t)sizeof(lg_op); }
