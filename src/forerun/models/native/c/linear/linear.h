/* Linear layers: how weights are packed, how rows are quantised for them, and the kernels. Part of forerun.h. */
#ifndef FORERUN_LINEAR_H
#define FORERUN_LINEAR_H

/* A number of 16 bits, whatever the machine has for them. */
FR_INLINE float fr_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff, bits;
    float f = (float)mag * 0x1p-24f; /* subnormal */
    memcpy(&bits, &f, 4);
    if (mag >= 0x7c00) bits = 0x7f800000u | ((mag & 0x3ff) << 13);
    else if (mag >= 0x400) bits = (mag << 13) + 0x38000000u;
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

/* The nearest number of 16 bits, to even on a tie; too large ones become infinite. */
FR_INLINE uint16_t fr_to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, mag = bits & 0x7fffffff;
    if (mag > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (mag >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (mag < 0x38800000) { /* subnormal: by adding a number whose unit is 2^-24 */
        float small, shift = 0.5f;
        memcpy(&small, &mag, 4);
        small += shift;
        memcpy(&mag, &small, 4);
        return (uint16_t)(sign | (mag - 0x3f000000));
    }
    return (uint16_t)(sign | ((mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13));
}

/* ---- linear: weights packed in panels of 4, 8 or 16 output rows ---- */
enum { FR_F32, FR_BF16, FR_P4, FR_P8, FR_P4W, FR_P8W, FR_P8M, FR_P5, FR_P5M, FR_P4K, FR_P5K, FR_P6K, FR_P4E, FR_FORMATS };
enum { FR_BLOCK = 32, FR_QUAD = 4, FR_SUPER = 8, FR_GROUP = 4, FR_WIDEST = 16, FR_MOST_PARTS = 3 };
/* F32 and BF16 are not packed: [outputs, inputs] as they lie. The others come in panels of W outputs; a panel is its
 * blocks of 32 inputs one after another. A block starts with integers, in eight groups of W * 4: group g has inputs
 * 4g..4g+3 of the first output, of the second, ... "Nibbles" are groups 0-3 with 4-7 in the upper halves. Then:
 *   P4   nibbles, W fp16 scales, W fp16 offsets                weight = scale * value + offset
 *   P8   bytes, W fp16 scales                                  weight = scale * value
 *   P4W  nibbles, W fp32 scales, W fp32 offsets
 *   P8W  bytes, W fp32 scales of the first half block, W of the second
 *   P8M  bytes, W fp32 scales, W fp32 offsets
 *   P5   nibbles, fifth bits by group, W fp16 scales           weight = scale * (value - 16)
 *   P5M  nibbles, fifth bits by group, W fp16 scales, W fp16 offsets
 *   P4K  nibbles, W uint8 factors of scales, W of offsets; after eight blocks W fp16 scales, W fp16 offsets
 *   P5K  as P4K, with fifth bits by group after the nibbles
 *   P6K  nibbles, bits 5 and 6 (groups 0-3 in the four pairs of a byte, then 4-7), W int8 factors of the first half
 *        block, W of the second; after eight blocks W fp16 scales            weight = scale * factor * (value - 32)
 *   P4E  nibbles that stand for FR_FLOAT_STEPS, W bf16 scales           weight = scale * step
 * The wide ones (P4W, P8W, P8M) hold in floats what the K ones hold as factors: more bytes and fewer instructions, which
 * is what the ARM kernels want. */
#define FR_FLOAT_STEPS 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 /* MXFP4's, doubled */
#define FR_FLOAT_STEPS_UP 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4 /* with P5's zero point added */
FR_INLINE int64_t fr_block_bytes(int format, int64_t w) {
    switch (format) {
    case FR_P4: return 20 * w;
    case FR_P8: return 34 * w;
    case FR_P4W: return 24 * w;
    case FR_P8W: case FR_P8M: return 40 * w;
    case FR_P5: return 22 * w;
    case FR_P5M: return 24 * w;
    case FR_P4K: case FR_P4E: return 18 * w;
    case FR_P5K: return 22 * w;
    case FR_P6K: return 26 * w;
    default: return 0;
    }
}

/* What follows every eight blocks. */
FR_INLINE int64_t fr_super_bytes(int format, int64_t w) {
    return format == FR_P6K ? 2 * w : format == FR_P4K || format == FR_P5K ? 4 * w : 0;
}

/* A weight's `kind` is its format and its panels' width. */
FR_INLINE int fr_kind(int format, int width) { return format | width << 8; }
FR_INLINE int fr_format(int kind) { return kind & 255; }
FR_INLINE int64_t fr_width(int kind) { return kind >> 8 ? kind >> 8 : 4; }
FR_INLINE int64_t fr_panel_bytes(int kind, int64_t inputs) {
    int64_t blocks = inputs / FR_BLOCK, w = fr_width(kind);
    return blocks * fr_block_bytes(fr_format(kind), w) + blocks / FR_SUPER * fr_super_bytes(fr_format(kind), w);
}

typedef struct {
    int32_t kind;
    int32_t outputs, inputs; /* inputs a multiple of 32 for packed formats, of 256 for K */
    const void *data;
    const float *bias; /* [outputs] or NULL */
} fr_weight;

/* Weights that share their input and lie side by side in the output, such as queries, keys and values. */
typedef struct {
    int64_t count;
    fr_weight part[FR_MOST_PARTS];
} fr_weights;

/* Zero points that unsigned arithmetic takes off: of P8, of P5 and P4E, and of P6K for each half block. */
#define FR_SHIFT 12582912.0f /* 1.5 * 2^23: its unit is one */
#define FR_SHIFT_BITS 0x4B400000
enum { FR_ZERO_8, FR_ZERO_5, FR_ZERO_6, FR_ZERO_6_LAST, FR_STARTS };

/* Activations ready for packed weights: four rows of one block of inputs. Groups lie block by block, [rows / 4,
 * inputs / 32], so that a kernel walks one pointer. */
typedef struct {
    int8_t values[2][FR_GROUP][FR_BLOCK / 2];
    float scales[FR_GROUP]; /* 16 significant bits at most */
    float sums[FR_GROUP];   /* scale * sum of the block */
#if defined(__aarch64__)
    float backs[FR_GROUP][4]; /* -1.5 * 2^23 * scale, four times over: see linear_dotprod.c */
#else
    float backs[FR_GROUP];                     /* -1.5 * 2^23 * scale: see linear_avx512.c */
    int32_t starts[FR_STARTS][FR_GROUP]; /* bits of 1.5 * 2^23 less a format's zero point times the sum */
#endif
} fr_group;

/* Sixteen rows of one block of inputs, for AMX. Tiles lie block by block, [rows / 16, inputs / 32], each from the start of
 * a cache line on: no row of one lies across two lines. */
enum { FR_TILE_ROWS = 16, FR_LINE = 64 };
typedef struct {
    int8_t values[FR_TILE_ROWS][FR_BLOCK];
    float scales[FR_TILE_ROWS], sums[FR_TILE_ROWS];
} fr_tile;

/* ---- quantize.c ---- */
typedef struct {
    fr_group *groups; /* NULL where all that read the rows read tiles */
    fr_tile *tiles;   /* NULL where the path has no use for them */
    int64_t rows, blocks;
} fr_quants;
/* Rows begin .. end, of each the blocks first .. last. */
typedef void (*fr_quantize_range)(const fr_quants *to, const float *x, int64_t begin, int64_t end, int64_t first, int64_t last);
void fr_quantize(const fr_quants *to, const float *x, int64_t begin, int64_t end, int64_t first, int64_t last); /* no tiles */
void fr_quantize_avx512(const fr_quants *to, const float *x, int64_t begin, int64_t end, int64_t first, int64_t last);
size_t fr_quants_bytes(int64_t rows, int64_t inputs);
fr_quants fr_quants_in(void *scratch, int64_t rows, int64_t inputs); /* laid out, not filled */
/* Groups are filled where they are asked for, and where there are no tiles. */
fr_quants fr_quantize_rows(const float *x, int64_t rows, int64_t inputs, void *scratch, int groups);

/* y[rows, sum of outputs] = x[rows, inputs] W^T + bias; scratch holds fr_quants_bytes(rows, inputs). */
void fr_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch);
/* The same, and where each row of y is largest, as fr_argmax_rows says it: found while y is still in the first cache. */
void fr_linear_tops(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch, int32_t *tops);

/* Rows first .. first + rows, which one expert's weights multiply. */
typedef struct {
    const fr_weights *w;
    int64_t first, rows;
    int64_t before; /* panels of the segments before it: fr_linear_segments fills it in */
} fr_segment;
/* How many rows apart segments begin: a multiple of this. */
enum { FR_APART = FR_TILE_ROWS };
/* The same by segments, each with its own weights: each weight is read once. `room` rows are laid out in x and y, and
 * scratch holds fr_quants_bytes(room, inputs). */
void fr_linear_segments(fr_segment *segments, int64_t count, const float *x, float *y, int64_t room, void *scratch);

/* Does the AMX kernel read these rows from tiles? P6K has a step for every sixteen inputs: there tiles pay later. */
FR_INLINE int fr_reads_tiles(int kind, int64_t rows) {
    return fr_width(kind) == FR_WIDEST && (fr_format(kind) != FR_P6K || rows >= 16);
}

/* A range of one weight's panels, begin .. end; y's rows are `stride` apart. */
typedef struct {
    const fr_weight *w;
    const float *x;
    const fr_group *q;    /* NULL where the kernel reads tiles */
    const fr_tile *tiles; /* the same rows, or NULL where tiles are of no use */
    float *y;
    int64_t rows, stride, begin, end;
} fr_range;
typedef void (*fr_kernel)(const fr_range *range);
void fr_packed_generic(const fr_range *range); /* any format, panels of any width */
void fr_packed_dotprod(const fr_range *range); /* 64-bit ARM, panels of 4: P4, P8, P4W, P8W, P8M, P4E */
void fr_packed_i8mm(const fr_range *range);    /* the same */
void fr_packed_avx2(const fr_range *range);    /* x86-64, panels of 8: P4, P8, P4E and the 5-bit and K formats */
void fr_packed_avx_vnni(const fr_range *range);
void fr_packed_avx512(const fr_range *range); /* x86-64, panels of 16: the same */
void fr_packed_amx(const fr_range *range);    /* x86-64 on Linux, panels of 16: the same */
int fr_amx_works(void);                       /* asks the system for tiles and tries one */
void fr_plain(const fr_range *range);         /* F32 and BF16 */

/* Calls `packed(g, format)` with the format as a constant, so that each format has code of its own. */
#define FR_CASE(format) case format: packed(g, format); break;
#define FR_BY_FORMAT(g, cases) switch (fr_format((g)->w->kind)) { cases default: break; }
#define FR_X86_CASES \
    FR_CASE(FR_P4) FR_CASE(FR_P8) FR_CASE(FR_P5) FR_CASE(FR_P5M) FR_CASE(FR_P4K) FR_CASE(FR_P5K) FR_CASE(FR_P6K) \
    FR_CASE(FR_P4E)
#define FR_ARM_CASES FR_CASE(FR_P4) FR_CASE(FR_P8) FR_CASE(FR_P4W) FR_CASE(FR_P8W) FR_CASE(FR_P8M) FR_CASE(FR_P4E)
#define FR_ALL_CASES FR_X86_CASES FR_CASE(FR_P4W) FR_CASE(FR_P8W) FR_CASE(FR_P8M)

/* GGUF's numbers of the types that the kernels read. */
enum { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8 };
enum { GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14, GGUF_IQ4_NL = 20, GGUF_MXFP4 = 39 };

#endif
