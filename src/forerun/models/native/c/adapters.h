/* LoRA changes of some rows, written once for vectors of sixteen floats: include with DOWN_ROWS and UP_ROWS, the names of
 * the two functions, and with v16, zero16, all16, load16, store16, halves16, fma16 and across16 defined for the machine.
 *
 * Every number is summed in the order of sixteen lanes, whatever rows are beside it, so all paths give the same bits.
 */
/* Four sums over all inputs for each of `rows` rows of one adapter. */
FR_INLINE void down_rows(const uint16_t *w, const float *x, int64_t inputs, int rows, float scale, float *middle,
                         int64_t stride) {
    v16 sum[FR_ALIKE][FR_RANKS];
    FR_UNROLL for (int r = 0; r < rows; r++) FR_UNROLL for (int k = 0; k < FR_RANKS; k++) sum[r][k] = zero16();
    for (int64_t i = 0; i < inputs; i += FR_LANES, w += FR_RANKS * FR_LANES) {
        float end[FR_ALIKE][FR_LANES];
        const float *from[FR_ALIKE];
        FR_UNROLL for (int r = 0; r < rows; r++) from[r] = x + r * inputs + i;
        if (inputs - i < FR_LANES) /* behind the last input lies another row */
            for (int r = 0; r < rows; r++) {
                memset(end[r], 0, sizeof end[r]);
                memcpy(end[r], from[r], (size_t)(inputs - i) * sizeof(float));
                from[r] = end[r];
            }
        FR_UNROLL for (int k = 0; k < FR_RANKS; k++) {
            v16 weights = halves16(w + k * FR_LANES);
            FR_UNROLL for (int r = 0; r < rows; r++) sum[r][k] = fma16(weights, load16(from[r]), sum[r][k]);
        }
    }
    FR_UNROLL for (int r = 0; r < rows; r++)
        FR_UNROLL for (int k = 0; k < FR_RANKS; k++) middle[r * stride + k] = scale * across16(sum[r][k]);
}

/* One panel of outputs of each of `rows` rows. */
FR_INLINE void up_rows(const uint16_t *w, int64_t rank, const float *middle, int64_t stride, float *const *y, int rows) {
    v16 sum[FR_ALIKE][FR_OUTPUTS / FR_LANES];
    FR_UNROLL for (int r = 0; r < rows; r++)
        FR_UNROLL for (int j = 0; j < FR_OUTPUTS / FR_LANES; j++) sum[r][j] = load16(y[r] + j * FR_LANES);
    for (int64_t k = 0; k < rank; k++, w += FR_OUTPUTS)
        FR_UNROLL for (int j = 0; j < FR_OUTPUTS / FR_LANES; j++) {
            v16 weights = halves16(w + j * FR_LANES);
            FR_UNROLL for (int r = 0; r < rows; r++) sum[r][j] = fma16(weights, all16(middle[r * stride + k]), sum[r][j]);
        }
    FR_UNROLL for (int r = 0; r < rows; r++)
        FR_UNROLL for (int j = 0; j < FR_OUTPUTS / FR_LANES; j++) store16(y[r] + j * FR_LANES, sum[r][j]);
}

#define BY_ROWS(call)                              \
    switch (rows) {                                \
    case 1: { enum { ROWS = 1 }; call; } break;    \
    case 2: { enum { ROWS = 2 }; call; } break;    \
    case 3: { enum { ROWS = 3 }; call; } break;    \
    default: { enum { ROWS = 4 }; call; }          \
    }

void DOWN_ROWS(const fr_change *change, int64_t block, const float *x, int64_t inputs, int64_t rows, float *middle,
               int64_t stride) {
    const uint16_t *w = change->down + block * FR_RANKS * ((inputs + FR_LANES - 1) / FR_LANES * FR_LANES);
    BY_ROWS(down_rows(w, x, inputs, ROWS, change->scale, middle + block * FR_RANKS, stride))
}

void UP_ROWS(const fr_change *change, int64_t panel, const float *middle, int64_t stride, float *const *y, int64_t rows) {
    const uint16_t *w = change->up + panel * change->rank * FR_OUTPUTS;
    BY_ROWS(up_rows(w, change->rank, middle, stride, y, ROWS))
}
