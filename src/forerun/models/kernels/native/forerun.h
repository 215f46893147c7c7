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

#define FR_API __attribute__((visibility("default")))
#define FR_INLINE static inline __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16)));

/* ---- pool.c: one thread pool for the process ---- */
typedef void (*fr_job)(void *arg, int64_t begin, int64_t end);
/* Run job over [0, count) in chunks of `grain`, on the caller and the workers; returns when all is done. */
void fr_parallel(fr_job job, void *arg, int64_t count, int64_t grain);
FR_API void fr_set_threads(int threads);
FR_API int fr_threads(void);

/* ---- linear: weights packed in panels of four output rows ---- */
enum { FR_F32 = 0, FR_BF16 = 1, FR_P4 = 2, FR_P8 = 3, FR_P4W = 4, FR_P8W = 5 };
enum { FR_BLOCK = 32, FR_PANEL = 4 };
/* Bytes per panel and block of 32 inputs:
 *   P4   64 nibbles, 4 fp16 scales, 4 fp16 offsets     weight = scale * nibble + offset
 *   P8  128 int8,    4 fp16 scales                     weight = scale * value
 *   P4W  as P4 with fp32 scales and offsets (Q4_K, whose scales are products)
 *   P8W  as P8 with two fp32 scales per row: one for each half block (Q6_K) */
enum { FR_P4_BYTES = 80, FR_P8_BYTES = 136, FR_P4W_BYTES = 96, FR_P8W_BYTES = 160 };

typedef struct {
    int32_t kind;
    int32_t outputs, inputs; /* inputs a multiple of 32 for packed kinds */
    const void *data;
    const float *bias; /* [outputs] or NULL */
} fr_weight;

/* Activations ready for packed weights: int8 blocks, one scale and one scaled sum per block. */
typedef struct {
    int8_t *values; /* [rows, inputs] */
    float *scales;  /* [rows, inputs / 32] */
    float *sums;    /* [rows, inputs / 32], scale * sum of the block */
} fr_quants;

/* Quantised rows needed by packed kinds; scratch must hold fr_quants_bytes. */
size_t fr_quants_bytes(int64_t rows, int64_t inputs);
fr_quants fr_quants_at(void *scratch, int64_t rows, int64_t inputs);
void fr_quantize_rows(const float *x, int64_t rows, int64_t inputs, fr_quants out);

/* y[rows, outputs] = x[rows, inputs] W^T + bias; `q` is needed for packed kinds only. */
void fr_linear(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows);

/* One panel range of fr_linear: y columns 4*begin .. 4*end. The dispatcher picks the best the machine has. */
typedef void (*fr_panels)(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows,
                          int64_t begin, int64_t end);
void fr_panels_generic(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows, int64_t begin,
                       int64_t end);
#if defined(__aarch64__)
void fr_panels_dotprod(const fr_weight *w, const float *x, fr_quants q, float *y, int64_t rows, int64_t begin,
                       int64_t end);
#endif
FR_API const char *fr_isa(void);

/* ---- ops.c: what stands between the linear layers ---- */
void fr_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t width);
void fr_rope(float *x, const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t stride,
             int64_t head_dim, int64_t rotary);
void fr_swiglu(const float *gate_up, float *y, int64_t rows, int64_t width);

typedef struct {
    const float *q;       /* [nodes, q_stride] with heads laid end to end */
    float *out;           /* [nodes, heads * head_dim] */
    const float *keys;    /* of this layer: + kv_head * head_stride + slot * head_dim */
    const float *values;
    const int32_t *slots; /* [nodes, slot_stride] the slots each node sees, by position */
    const int32_t *seen;  /* [nodes] how many */
    float *scratch;       /* [nodes * heads, slot_stride] */
    int64_t nodes, heads, kv_heads, head_dim, q_stride, head_stride, slot_stride;
    int64_t window; /* 0 = everything, else only the last `window` positions */
    float scale;
} fr_attention_args;
void fr_attention(const fr_attention_args *args);

#endif
