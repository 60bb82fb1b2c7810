/* gemm: shares the tiles and panels of a multiplication out among the threads. */
#include "gemm.h"

/* Up to so many elements of x each thread prepares for itself: that is quicker than two barriers. */
#define OWN_ELEMENTS 8192
/* Panels of a task stay in the second-level cache while its rows stream past them. */
#define CACHED_BYTES (384 * 1024)
/* What a task reads where there is one tile only: enough to pay for its lg_take. */
#define STREAMED_BYTES (96 * 1024)
#define TILES_A_TASK 8

LG_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
LG_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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
    const int64_t limit = tiles == 1 ? STREAMED_BYTES : CACHED_BYTES;
    int64_t group = larger(1, limit / larger(1, g->panel_bytes));
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
