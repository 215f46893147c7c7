/* Scales of one block of a panel, written once for vectors of 256 and of 512 bits: include with W, and with vec, vec_zero,
 * vec_mul, halves, bf16s, unsigned_bytes and signed_bytes defined for vectors of W floats. */

/* Of the block (P6K: of its halves), their offsets, and what factors multiply. */
typedef struct {
    vec d, d2, m, super_d, super_m;
} block_scales;

FR_INLINE int has_offsets(int format) { return format != FR_P8 && format != FR_P5 && format != FR_P4E && format != FR_P6K; }
FR_INLINE int is_super(int format) { return format == FR_P4K || format == FR_P5K || format == FR_P6K; }

/* `after` is where the super block's own scales lie, read only in formats that have one. */
FR_INLINE block_scales super_scales(int format, const uint8_t *after) {
    block_scales s;
    s.d = s.d2 = s.m = s.super_d = s.super_m = vec_zero();
    if (is_super(format)) s.super_d = halves(after);
    if (format == FR_P4K || format == FR_P5K) s.super_m = halves(after + 2 * W);
    return s;
}

FR_INLINE void read_scales(int format, const uint8_t *block, block_scales *s) {
    const uint8_t *end = block + fr_block_bytes(format, W);
    if (format == FR_P4 || format == FR_P5M) s->d = halves(end - 4 * W), s->m = halves(end - 2 * W);
    else if (format == FR_P8 || format == FR_P5) s->d = halves(end - 2 * W);
    else if (format == FR_P4E) s->d = bf16s(end - 2 * W);
    else if (format == FR_P6K) {
        s->d = vec_mul(s->super_d, signed_bytes(end - 2 * W));
        s->d2 = vec_mul(s->super_d, signed_bytes(end - W));
    } else {
        s->d = vec_mul(s->super_d, unsigned_bytes(end - 2 * W));
        s->m = vec_mul(s->super_m, unsigned_bytes(end - W));
    }
}
