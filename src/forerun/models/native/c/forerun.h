/* Forerun's native kernels: one header for the few files beside it.
 *
 * What they are for: on a CPU a pass over a few nodes must cost little more than a pass over one, and every row
 * of a result must have the same bits whatever other rows are in the pass. So: weights are read once per pass and
 * used for all rows; each row is reduced in one fixed order that knows nothing of its neighbours; fused
 * multiply-adds are written out (the build turns contraction off) so that the compiler cannot choose differently.
 */
#ifndef FORERUN_H
#define FORERUN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FR_API __attribute__((visibility("default")))
#define FR_INLINE static inline __attribute__((always_inline))
/* Does the compiler know AVX-VNNI and AMX? Without them the library has the lesser paths. */
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define FR_NEW_X86 1
#else
#define FR_NEW_X86 0
#endif
/* ... and the matrix instructions of 64-bit ARM? */
#if defined(__aarch64__) && (defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 10)
#define FR_HAS_I8MM 1
#else
#define FR_HAS_I8MM 0
#endif
/* Before loops of a few steps whose arrays must become registers. */
#if defined(__clang__)
#define FR_UNROLL _Pragma("unroll")
#else
#define FR_UNROLL _Pragma("GCC unroll 16")
#endif

/* ---- pool.c: one thread pool for the process ---- */
enum { FR_MAX_THREADS = 64 };
/* `worker` is below FR_MAX_THREADS and differs between chunks that run at the same time. */
typedef void (*fr_job)(void *arg, int64_t begin, int64_t end, int worker);
/* Run job over [0, count) in chunks of `grain`, on the caller and the workers; returns when all is done. */
void fr_parallel(fr_job job, void *arg, int64_t count, int64_t grain);
FR_API void fr_set_threads(int threads);
FR_API int fr_threads(void);

FR_API void fr_use_huge_pages(void *memory, int64_t bytes); /* memory.c */

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

/* ---- linear: weights packed in panels of 4, 8 or 16 output rows ---- */
enum { FR_F32, FR_BF16, FR_P4, FR_P8, FR_P4W, FR_P8W, FR_P8M, FR_P5, FR_P5M, FR_P4K, FR_P5K, FR_P6K, FR_FORMATS };
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
 * The wide ones (P4W, P8W, P8M) hold in floats what the K ones hold as factors: more bytes and fewer instructions, which
 * is what the ARM kernels want. */
FR_INLINE int64_t fr_block_bytes(int format, int64_t w) {
    switch (format) {
    case FR_P4: return 20 * w;
    case FR_P8: return 34 * w;
    case FR_P4W: return 24 * w;
    case FR_P8W: case FR_P8M: return 40 * w;
    case FR_P5: return 22 * w;
    case FR_P5M: return 24 * w;
    case FR_P4K: return 18 * w;
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

/* Zero points that unsigned arithmetic takes off: of P8, of P5, and of P6K for each half block. */
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

/* Sixteen rows of one block of inputs, for AMX. Tiles lie block by block, [rows / 16, inputs / 32]. */
enum { FR_TILE_ROWS = 16 };
typedef struct {
    int8_t values[FR_TILE_ROWS][FR_BLOCK];
    float scales[FR_TILE_ROWS], sums[FR_TILE_ROWS];
} fr_tile;

/* ---- quantize.c ---- */
typedef struct {
    fr_group *groups;
    fr_tile *tiles; /* NULL where the path has no use for them */
    int64_t rows, blocks;
} fr_quants;
typedef void (*fr_quantize_range)(const fr_quants *to, const float *x, int64_t begin, int64_t end);
void fr_quantize(const fr_quants *to, const float *x, int64_t begin, int64_t end); /* fills no tiles */
void fr_quantize_avx512(const fr_quants *to, const float *x, int64_t begin, int64_t end);
size_t fr_quants_bytes(int64_t rows, int64_t inputs);
fr_quants fr_quantize_rows(const float *x, int64_t rows, int64_t inputs, void *scratch);

/* y[rows, sum of outputs] = x[rows, inputs] W^T + bias; scratch holds fr_quants_bytes(rows, inputs). */
void fr_linear(const fr_weights *w, const float *x, float *y, int64_t rows, void *scratch);

/* A range of one weight's panels, begin .. end; y's rows are `stride` apart. */
typedef struct {
    const fr_weight *w;
    const float *x;
    const fr_group *q;
    const fr_tile *tiles; /* the same rows, or NULL where tiles are of no use */
    float *y;
    int64_t rows, stride, begin, end;
} fr_range;
typedef void (*fr_kernel)(const fr_range *range);
void fr_packed_generic(const fr_range *range); /* any format, panels of any width */
void fr_packed_dotprod(const fr_range *range); /* 64-bit ARM, panels of 4: P4, P8, P4W, P8W, P8M */
void fr_packed_i8mm(const fr_range *range);    /* the same */
void fr_packed_avx2(const fr_range *range);    /* x86-64, panels of 8: P4, P8 and the 5-bit and K formats */
void fr_packed_avx_vnni(const fr_range *range);
void fr_packed_avx512(const fr_range *range); /* x86-64, panels of 16: the same */
void fr_packed_amx(const fr_range *range);    /* x86-64 on Linux, panels of 16: the same */
int fr_amx_works(void);                       /* asks the system for tiles and tries one */
void fr_plain(const fr_range *range);         /* F32 and BF16 */

/* ---- dispatch.c: compiled for the least of machines ---- */
fr_kernel fr_packed_kernel(int kind);
int fr_chosen_width(void);             /* of the panels that the chosen path reads */
int fr_uses_tiles(int64_t rows);       /* does it want so many rows in tiles? */
fr_quantize_range fr_chosen_quantize(void);
FR_API const char *fr_isa(void);       /* "" where the machine lacks what the library is built on */
FR_API const char *fr_variant(int i);  /* names of all paths of this architecture, best first; NULL after the last */
FR_API int fr_has(const char *isa);    /* can this machine run it? */
FR_API int fr_choose(const char *isa); /* before weights are packed: 0 = chosen, 1 = not on this machine */

/* ---- ops.c, attention.c: what stands between the linear layers ---- */
void fr_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t width);
void fr_rope(float *x, const float *cosines, const float *sines, const int32_t *position, int64_t rows, int64_t heads,
             int64_t stride, int64_t head_dim, int64_t rotary);
typedef void (*fr_swiglu_of_row)(const float *gate, const float *up, float *y, int64_t width);
void fr_swiglu_row(const float *gate, const float *up, float *y, int64_t width);
void fr_swiglu_row_avx512(const float *gate, const float *up, float *y, int64_t width);
fr_swiglu_of_row fr_chosen_swiglu(void); /* dispatch.c */
void fr_swiglu(const float *gate_up, float *y, int64_t rows, int64_t width);
void fr_add(float *x, const float *delta, int64_t count);

enum { FR_TOGETHER = 8 }; /* queries that read the same keys at most */
struct fr_queries;        /* a tile of them: attention.h */
typedef void (*fr_attend_tile)(struct fr_queries *tile, int count);
void fr_attend(struct fr_queries *tile, int count);        /* up to four */
void fr_attend_avx512(struct fr_queries *tile, int count); /* up to eight */
typedef struct {
    fr_attend_tile attend;
    int together;
} fr_attention_path;
const fr_attention_path *fr_chosen_attention(void); /* dispatch.c */

/* What a node sees: `context` slots in a row from `first`, then the slots in its row of `tails`, itself last. */
typedef struct {
    const int32_t *first, *context, *tail; /* [nodes]; tail = how many slots its row has */
    const int32_t *tails;                  /* [nodes, tail_stride] */
    int64_t tail_stride, most;             /* most = the largest context + tail */
} fr_reach;

typedef struct {
    fr_reach reach;
    const float *q;    /* [nodes, q_stride] with heads laid end to end */
    float *out;        /* [nodes, heads * head_dim] */
    const float *keys; /* of this layer: + kv_head * head_stride + slot * head_dim */
    const float *values;
    float *scratch;       /* [FR_MAX_THREADS, FR_TOGETHER, reach.most + 4] */
    const int32_t *tiles; /* [tile_count, 2] from fr_attention_tiles */
    int64_t tile_count, heads, kv_heads, head_dim, q_stride, head_stride;
    int64_t window; /* 0 = everything, else only the last `window` positions */
    float scale;
} fr_attention_args;
void fr_attention(const fr_attention_args *args);
/* Which queries walk together; tiles has room for nodes * group pairs. Returns how many there are. */
int64_t fr_attention_tiles(const fr_reach *reach, int64_t nodes, int64_t group, int32_t *tiles);

/* ---- gguf.c: what tokens are looked up in ---- */
typedef struct {
    int64_t type, row_bytes; /* a GGUF type and bytes per row; -1 = float32 */
    const void *rows;        /* NULL where the caller looks them up */
} fr_table;
/* out[count, width] = the rows of these tokens; the caller has checked that they are there. */
void fr_embed(const fr_table *table, int64_t width, const int64_t *tokens, int64_t count, float *out);

/* ---- decoder.c: a whole pass ---- */
typedef struct {
    const float *attention_norm, *mlp_norm; /* [width] */
    const float *q_norm, *k_norm;           /* [head_dim] or NULL */
    fr_weights qkv, output, gate_up, down;
    int64_t window; /* 0 = everything */
    int64_t rotate; /* 0: this layer has no positions */
} fr_layer;

typedef struct {
    int64_t layers, width, heads, kv_heads, head_dim, rotary, inner, vocab;
    float eps, attention_scale;
    const fr_layer *layer;
    const float *final_norm;
    fr_weights head;
    fr_table embedding;
} fr_decoder;

typedef struct {
    int64_t nodes;
    const int64_t *tokens;        /* [nodes], or NULL: x has them embedded already */
    float *x;                     /* [nodes, width] residual stream, for the caller to read; may be NULL with tokens */
    const float *cosines, *sines; /* [positions, rotary / 2] */
    const int32_t *position;      /* [nodes] which row of them */
    const int32_t *write;         /* [nodes] slot that takes the node's key and value */
    fr_reach reach;
    float *keys, *values; /* [layers, kv_heads, slots, head_dim] by the strides below */
    int64_t layer_stride, head_stride;
    const int64_t *hidden_layers; /* [hidden_count] layers whose input is wanted */
    float *const *hidden;         /* [hidden_count] -> [nodes, width] */
    int64_t hidden_count;
    float *normed; /* [nodes, width] after the last norm, or NULL */
    float *logits; /* [nodes, vocab] or NULL */
    int32_t *tops; /* [nodes] where each row of logits is largest, the first on a tie; or NULL */
} fr_pass;

FR_API int64_t fr_layout(void);
FR_API int fr_decode(const fr_decoder *model, const fr_pass *pass);
FR_API int fr_linear_rows(const fr_weights *w, const float *x, float *y, int64_t rows);

/* ---- topk.c: the likeliest entries of rows of logits ---- */
typedef struct {
    int64_t rows, count, k;   /* 1 <= k <= count */
    const float *x;           /* [rows, count] */
    const float *scale;       /* [rows] or NULL: x times this */
    const float *noise;       /* [.., count] or NULL: taken off x */
    const int32_t *noise_row; /* [rows] which row of it; -1 = none */
    float *values;            /* [rows, k] best first; log-probabilities where totals are asked for */
    int32_t *indices;         /* [rows, k] */
    float *totals;            /* [rows] or NULL: log of the sum of all exponentials */
} fr_top;
FR_API int fr_top_rows(const fr_top *top);
FR_API void fr_argmax_rows(const float *x, int64_t rows, int64_t count, int32_t *out);
FR_API void fr_log_noise(const int32_t *ids, int64_t count, uint32_t low, uint32_t high, float *out);

/* ---- head.c: an EAGLE head ---- */
typedef struct {
    int64_t width, heads, kv_heads, head_dim, inner;
    int64_t features, parts; /* numbers in the features of a true row, and of how many layers they are */
    int64_t joins_token;     /* EAGLE-1: fc reads token and feature; EAGLE-3: fc reads the features of true rows */
    int64_t norm_before_residual, norm_output;
    float eps, attention_scale;
    const float *token_norm, *feature_norm, *mlp_norm; /* [width]; the first two not for EAGLE-1 */
    const float *out_norm;                             /* [width] or NULL */
    const float *input_norm, *part_norms;              /* [features] or NULL */
    fr_weights fc, qkv, output, gate_up, down, lm_head;
    fr_table embedding;
} fr_head;

typedef struct {
    int64_t rows;
    const int64_t *tokens;        /* [rows] */
    const float *embedded;        /* [rows, width] or NULL: look the tokens up in the head's table */
    const float *const *features; /* [rows, parts] where the features of true rows lie; NULL = the rows are drafted */
    const float *before;          /* outputs of the rows before drafted ones, [.., width] */
    const int32_t *parents;       /* [rows] which of them */
    float *out;                   /* [rows, width] */
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    const int32_t *position;      /* [rows] which row of them */
    const int32_t *write;         /* [rows] slot that takes the row's key and value */
    fr_reach reach;
    float *keys, *values; /* [kv_heads, slots, head_dim] */
    int64_t head_stride;
} fr_head_pass;

FR_API int64_t fr_head_layout(void);
FR_API int fr_head_run(const fr_head *head, const fr_head_pass *pass);
FR_API int fr_head_rank(const fr_head *head, const float *out, float *logits, const fr_top *top);

/* ---- gguf.c, pack.c: GGUF types are numbered as in the file ---- */
/* 32 weights of one row: value[k] * scale[k / 16] + offset. */
typedef struct {
    int8_t values[32];
    float scales[2], offset;
    uint16_t half_scale, half_offset; /* as the file has them; of the whole super block where there is one, */
    uint8_t factors[2], offset_factor; /* and what this block multiplies them with */
} fr_block;
void fr_read_block(int type, const uint8_t *row, int64_t block, fr_block *out);

FR_API int fr_packed_kind(int type);
FR_API int64_t fr_packed_bytes(int kind, int64_t outputs, int64_t inputs);
FR_API void fr_pack(int type, const uint8_t *raw, int64_t row_bytes, int64_t outputs, int64_t inputs, uint8_t *out);
FR_API void fr_unpack_rows(int type, const uint8_t *raw, int64_t row_bytes, int64_t inputs, const int64_t *rows,
                           int64_t count, float *out);

#endif
