/* progress: tells, from inside a program, how far it has come. */
#include <unistd.h>

#include "op.h"

/* n: the number, the descriptor; p: where the number goes, int64. */
LG_API void lg_note_progress(const lg_op *op, lg_team *team) {
    if (team->rank != 0) return;
    /* All that the operations before have written is seen by whoever sees the number. */
    __atomic_store_n((int64_t *)op->p[0], op->n[0], __ATOMIC_RELEASE);
    /* Nothing to do where it fails: a full pipe wakes its reader anyway. */
    ssize_t written = write((int)op->n[1], "", 1);
    (void)written;
}
