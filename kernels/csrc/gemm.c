/* gemm: shares the tiles and panels of a multiplication out among the threads. */
#include "gemm.h"

/* Up to so many elements of x each thread prepares for itself: that is quicker than two barriers. */
#define OWN_ELEMENTS 8192
/* Panels of a task stay in the second-level cache while its rows stream past them. */
#define CACHED_BYTES (384 * 1024)
#define TILES_A_TASK 8

LG_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
LG_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Few rows: every panel is read once, and memory is the limit. It is read fastest in long runs, so a
 * thread has most of its panels in a row; what is left goes to whoever is free. */
static void stream(const lg_gemm *g, const void *kind, lg_gemm_multiply multiply,
                   const uint8_t *prepared, int64_t panels, lg_team *team) {
    const int64_t size = team->size;
    int64_t begin, end, left = 0;
    lg_share(team, panels, &begin, &end);
    for (int64_t panel = begin; panel < begin + (end - begin) * 3 / 4; panel++)
        multiply(g, kind, 0, (int)g->rows, prepared, panel);
    for (int64_t r = 0; r < size; r++) {
        const int64_t count = panels * (r + 1) / size - panels * r / size;
        left += count - count * 3 / 4;
    }
    for (int64_t task; (task = lg_take(team, 1, left)) >= 0;) {
        int64_t r = size - 1, count, kept; /* from the last thread's: the others are at work */
        for (;; r--) {
            count = panels * (r + 1) / size - panels * r / size;
            kept = count - count * 3 / 4;
            if (task < kept) break;
            task -= kept;
        }
        multiply(g, kind, 0, (int)g->rows, prepared, panels * r / size + count * 3 / 4 + task);
    }
}

void lg_gemm_run(const lg_gemm *g, const void *kind, lg_gemm_prepare prepare,
                 lg_gemm_multiply multiply, lg_team *team) {
    if (g->rows == 0 || g->outputs == 0) return;
    const int64_t tiles = (g->rows + LG_TILE_ROWS - 1) / LG_TILE_ROWS;
    const int64_t panels = (g->outputs + LG_PANEL - 1) / LG_PANEL;
    const size_t bytes = (size_t)(g->rows * g->row_bytes);
    uint8_t *prepared;
    if (team->size == 1 || g->rows * g->depth <= OWN_ELEMENTS) {
        prepared = lg_scratch(team, bytes);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = g->rows * t / tiles, end = g->rows * (t + 1) / tiles;
            prepare(g, kind, row, (int)(end - row), prepared + row * g->row_bytes);
        }
    } else {
        prepared = lg_team_scratch(team, bytes);
        for (int64_t t; (t = lg_take(team, 0, tiles)) >= 0;) {
            const int64_t row = g->rows * t / tiles, end = g->rows * (t + 1) / tiles;
            prepare(g, kind, row, (int)(end - row), prepared + row * g->row_bytes);
        }
        lg_barrier(team);
    }
    if (tiles == 1) {
        stream(g, kind, multiply, prepared, panels, team);
        return;
    }
    int64_t group = larger(1, CACHED_BYTES / larger(1, g->panel_bytes));
    const int64_t blocks = (tiles + TILES_A_TASK - 1) / TILES_A_TASK;
    /* Some tasks more than threads, so that they end together. */
    group = larger(1, smaller(group, panels * blocks / (8 * team->size)));
    const int64_t groups = (panels + group - 1) / group;
    for (int64_t task; (task = lg_take(team, 1, groups * blocks)) >= 0;) {
        const int64_t first = task / blocks * group, last = smaller(first + group, panels);
        const int64_t block = task % blocks;
        for (int64_t t = tiles * block / blocks; t < tiles * (block + 1) / blocks; t++) {
            const int64_t row = g->rows * t / tiles, end = g->rows * (t + 1) / tiles;
            for (int64_t panel = first; panel < last; panel++)
                multiply(g, kind, row, (int)(end - row), prepared + row * g->row_bytes, panel);
        }
    }
}
