/* activation: the functions between the layers of an MLP, sixteen values at a time. */
#ifndef LEGATO_ACTIVATION_H
#define LEGATO_ACTIVATION_H

#include "vec.h"

LG_INLINE lg_f32x16 lg_silu(lg_f32x16 x) { return x / (1.0f + lg_exp(-x)); }

/* GELU in its tanh form: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)), as
 * (1 + tanh(y)) / 2 = sigmoid(2 y). */
LG_INLINE lg_f32x16 lg_gelu_tanh(lg_f32x16 x) {
    lg_f32x16 y = x * (1.59576912f + 0.0713548163f * x * x);
    return x / (1.0f + lg_exp(-y));
}

#endif
