/* gemm: shares the tiles and panels of a multiplication out among the threads. */
#include "activation.h"
#include "gemm.h"

/* Up to so many elements of x each thread prepares for itself: that is quicker than two barriers. */
#define OWN_ELEMENTS 8192
/* Panels of a task stay in the second-level cache while its rows stream past them. */
#define CACHED_BYTES (384 * 1024)
#define TILES_A_TASK 8

LG_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
LG_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

LG_INLINE int64_t tile_begin(const lg_gemm *g, int64_t tile, int64_t tiles) {
    return g->rows * tile / tiles;
}

/* All tiles in the form that `multiply` reads, in memory of this thread or of the team. */
static const uint8_t *prepare_all(const lg_gemm *g, const void *kind, lg_gemm_prepare prepare,
                                  int64_t tiles, lg_team *team) {
    const size_t bytes = (size_t)(g->rows * g->row_bytes);
    const int own = team->size == 1 || g->rows * g->depth <= OWN_ELEMENTS;
    uint8_t *to = own ? lg_scratch(team, bytes) : lg_team_scratch(team, bytes);
    for (int64_t i = 0, t; (t = own ? i : lg_take(team, 0, tiles)) >= 0 && t < tiles; i++) {
        const int64_t row = tile_begin(g, t, tiles), end = tile_begin(g, t + 1, tiles);
        prepare(g, kind, row, (int)(end - row), to + row * g->row_bytes);
    }
    if (!own) lg_barrier(team);
    return to;
}

/* Tasks of run_one_tile: lg_claim counts up to 65535 a thread. */
#define MOST_TASKS 65535

/* One tile: each panel is read once, so memory is the limit, and it is read fastest in one long run
 * a thread. */
static void run_one_tile(const lg_gemm *g, const void *kind, lg_gemm_prepare prepare,
                         lg_gemm_multiply multiply, int64_t panels, lg_team *team) {
    const int64_t piece = (panels + MOST_TASKS - 1) / MOST_TASKS;
    const int64_t tasks = (panels + piece - 1) / piece;
    const uint8_t *prepared = prepare_all(g, kind, prepare, 1, team);
    for (int64_t task; (task = lg_claim(team, tasks)) >= 0;)
        for (int64_t panel = task * piece; panel < smaller((task + 1) * piece, panels); panel++)
            multiply(g, kind, 0, (int)g->rows, prepared, panel);
}

void lg_gemm_end_gated(const lg_gemm *g, int rows, int64_t row, int64_t panel,
                       lg_fvec sums[][LG_PARTS]) {
    _Static_assert(LG_GATED == LG_LANES && LG_PANEL == 2 * LG_GATED, "gate, then up");
    const int64_t column = panel * LG_GATED, left = g->outputs / 2 - column;
    for (int r = 0; r < rows; r++) {
        const float *sum = (const float *)sums[r];
        const lg_f32x16 gate = lg_load(sum), up = lg_load(sum + LG_GATED);
        const lg_f32x16 active = g->finish == LG_SILU_MUL ? lg_silu(gate) : lg_gelu_tanh(gate);
        lg_store_n(g->out + (row + r) * g->out_stride + column, active * up, left);
    }
}

void lg_gemm_run(const lg_gemm *g, const void *kind, lg_gemm_prepare prepare,
                 lg_gemm_multiply multiply, lg_team *team) {
    if (g->rows == 0 || g->outputs == 0) return;
    const int64_t tiles = (g->rows + LG_TILE_ROWS - 1) / LG_TILE_ROWS;
    const int64_t panels = (g->outputs + LG_PANEL - 1) / LG_PANEL;
    if (tiles == 1) {
        run_one_tile(g, kind, prepare, multiply, panels, team);
        return;
    }
    const uint8_t *prepared = prepare_all(g, kind, prepare, tiles, team);
    const int64_t blocks = (tiles + TILES_A_TASK - 1) / TILES_A_TASK;
    /* Some tasks more than threads, so that they end together. */
    const int64_t most = panels * blocks / (8 * team->size);
    const int64_t group = larger(1, smaller(CACHED_BYTES / larger(1, g->panel_bytes), most));
    const int64_t groups = (panels + group - 1) / group;
    for (int64_t task; (task = lg_take(team, 1, groups * blocks)) >= 0;) {
        const int64_t first = task / blocks * group, last = smaller(first + group, panels);
        const int64_t block = task % blocks;
        for (int64_t t = tiles * block / blocks; t < tiles * (block + 1) / blocks; t++) {
            const int64_t row = tile_begin(g, t, tiles), end = tile_begin(g, t + 1, tiles);
            const uint8_t *from = prepared + row * g->row_bytes;
            int64_t panel = first;
            if (g->multiply_two != NULL)
                for (; panel + 1 < last; panel += 2)
                    g->multiply_two(g, kind, row, (int)(end - row), from, panel);
            for (; panel < last; panel++) multiply(g, kind, row, (int)(end - row), from, panel);
        }
    }
}
