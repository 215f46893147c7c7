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
#ifndef FR_INLINE /* under sanitizers the compiler takes a minute over what this makes one function */
#define FR_INLINE static inline __attribute__((always_inline))
#endif
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

/* ---- linear layers ---- */
#include "linear/linear.h"

/* ---- dispatch.c: compiled for the least of machines ---- */
fr_kernel fr_packed_kernel(int kind);
int fr_chosen_width(void);             /* of the panels that the chosen path reads */
int fr_uses_tiles(int64_t rows);       /* does it want this number of rows in tiles? */
fr_quantize_range fr_chosen_quantize(void);
FR_API const char *fr_isa(void);       /* "" where the machine lacks what the library is built on */
FR_API const char *fr_variant(int i);  /* names of all paths of this architecture, best first; NULL after the last */
FR_API int fr_prefers_half(void);      /* should a cache hold 16-bit numbers? */
FR_API int fr_has(const char *isa);    /* can this machine run it? */
FR_API int fr_choose(const char *isa); /* before weights are packed: 0 = chosen, 1 = not on this machine */

/* ---- ops.c, attention.c: what stands between the linear layers ---- */
void fr_rms_norm(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t width);
/* What a part of a layer adds to the residual stream: delta, normed where there is a weight, times scale; total
 * multiplies the sum. */
typedef struct {
    float *delta;
    const float *norm; /* [width] or NULL */
    float scale, total; /* total: 0 = 1 */
} fr_added;
/* x += what is added where there is something, then y = the norm of x where there is a weight; many rows are shared out. */
void fr_add_norm(float *x, fr_added added, const float *weight, float eps, float *y, int64_t rows, int64_t width);
#ifndef FR_AT_ONCE /* numbers that one thread has done before another would have begun; checks share out every row */
#define FR_AT_ONCE 4096
#endif
FR_INLINE int64_t fr_rows_at_once(int64_t width) { return width < FR_AT_ONCE ? FR_AT_ONCE / width : 1; }
void fr_rope(float *x, const float *cosines, const float *sines, const int32_t *position, int64_t rows, int64_t heads,
             int64_t stride, int64_t head_dim, int64_t rotary);
enum { FR_SILU, FR_GELU_TANH, FR_RELU2 }; /* activations; the last is the square of what is positive, without a gate */
#define FR_GELU_LINEAR 1.59576912f  /* 2 sqrt(2 / pi): gelu(g) = g / (1 + exp(-(linear g + cubic g^3))), by tanh */
#define FR_GELU_CUBIC 0.0713548163f /* 0.044715 times as much */
typedef void fr_gate_row(const float *gate, const float *up, float *y, int64_t width, int activation);
fr_gate_row fr_gate_row_least, fr_gate_row_avx512;
fr_gate_row *fr_chosen_gate(void); /* dispatch.c */
void fr_square_row(const float *x, float *y, int64_t width); /* FR_RELU2 */
void fr_gate(const float *gate_up, float *y, int64_t rows, int64_t width, int activation);
void fr_open_gates(const float *gates, float *y, int64_t rows, int64_t width); /* y times a sigmoid of the gates */
/* x times scale, and where there is a cap, cap tanh(x / cap). */
void fr_scale_and_cap(float *x, int64_t count, float scale, float cap);
void fr_to_halves(const float *x, uint16_t *y, int64_t count); /* a multiple of four */
/* count integers of 8 bits and the float that they are multiplied by, the largest one's share of 127. */
void fr_to_bytes(const float *x, int8_t *y, int64_t count);

/* What a KV cache holds. A row, which is a head's keys or values of one slot, has head_dim numbers; behind those of 8 bits
 * lies their scale, a float. */
enum { FR_FLOATS, FR_HALVES, FR_BYTES };
FR_INLINE int64_t fr_number_bytes(int64_t kind) { return kind == FR_BYTES ? 1 : kind == FR_HALVES ? 2 : 4; }
FR_INLINE int64_t fr_row_bytes(int64_t kind, int64_t dim) { return kind == FR_BYTES ? dim + 4 : dim * fr_number_bytes(kind); }
void fr_write_head(void *cache, int64_t kind, int64_t at, const float *from, int64_t dim); /* at number `at` */

enum { FR_TOGETHER = 24, FR_ROOM = 16 }; /* queries that read the same keys at most; numbers behind the scores of each */
struct fr_queries;        /* a tile of them: attention.h */
typedef void (*fr_attend_tile)(struct fr_queries *tile);
void fr_attend(struct fr_queries *tile);
void fr_attend_avx512(struct fr_queries *tile);
typedef struct {
    fr_attend_tile attend;
    int least, most; /* queries of a tile, if there are as many; most = least doubled some times */
    int half; /* reads a cache of 16-bit numbers as fast as it comes from memory */
} fr_attention_path;
const fr_attention_path *fr_chosen_attention(void); /* dispatch.c */

enum { FR_PAGE = 64 }; /* slots of a page, which follow each other */
/* What a node sees: `context` positions, then the slots in its row of `tails`, itself last. Position i of the context
 * lies on page pages[first + i / FR_PAGE]; without pages it is slot first + i. */
typedef struct {
    const int32_t *first, *context, *tail; /* [nodes]; tail = how many slots its row has */
    const int32_t *tails;                  /* [nodes, tail_stride] */
    int64_t tail_stride, most;             /* most = the largest context + tail */
    const int32_t *pages;                  /* of all sequences, or NULL */
} fr_reach;

typedef struct {
    fr_reach reach;
    const float *q;    /* [nodes, q_stride] with heads laid end to end */
    float *out;        /* [nodes, heads * value_dim] */
    const void *keys; /* of this layer: + kv_head * head_stride numbers, then row by row */
    const void *values;
    int64_t kind;
    float *scratch;       /* [FR_MAX_THREADS, FR_TOGETHER, reach.most + FR_ROOM] */
    const int32_t *tiles; /* [tile_count, 2] from fr_attention_tiles */
    int64_t tile_count, heads, kv_heads, head_dim, q_stride, head_stride;
    int64_t value_dim;  /* numbers of a row of values that are read; 0 = head_dim */
    int64_t row_stride; /* from a slot's numbers to the next one's; 0 = they follow each other */
    int64_t window; /* 0 = everything, else only the last `window` positions */
    float scale, cap; /* cap of the scores; 0 = none */
    const float *sinks; /* [heads] a score beside those of the positions, which brings no value; or NULL */
} fr_attention_args;
void fr_attention(const fr_attention_args *args);
/* Which queries walk together; tiles has room for nodes * group pairs. Returns how many there are. */
int64_t fr_attention_tiles(const fr_reach *reach, int64_t nodes, int64_t group, int64_t kv_heads, int32_t *tiles);

/* ---- gguf.c: what tokens are looked up in ---- */
typedef struct {
    int64_t type, row_bytes; /* a GGUF type and bytes per row; -1 = float32, -2 = bfloat16 */
    const void *rows;        /* NULL where the caller looks them up */
} fr_table;
/* out[count, width] = the rows of these tokens; the caller has checked that they are there. */
void fr_embed(const fr_table *table, int64_t width, const int64_t *tokens, int64_t count, float *out);

/* ---- experts.c: feed-forward layers whose router picks a few experts per row ---- */
typedef struct {
    int64_t count, per_token, inner;
    int64_t renormalise;              /* the weights of a row's experts sum to one */
    int64_t sigmoid;                  /* scores are sigmoids, not a softmax */
    int64_t groups, kept_groups;      /* of experts, and how many a row may pick from: those of the best scores */
    int64_t shared_inner;             /* of the expert that every row goes through; 0 = there is none */
    int64_t activation;
    float scale;                      /* of the weights of a row's experts */
    const float *scales;              /* [count] of what each expert gives; NULL = 1 */
    const float *correction;          /* [count] added to the scores for the choice only; NULL = nothing */
    float limit, alpha;               /* 0, or as gpt-oss: gate sigmoid(alpha gate) (up + 1), both limited first */
    fr_weights router;                /* [count, width] */
    const fr_weights *gate_up, *down; /* [count] */
    fr_weights shared_gate_up, shared_down, shared_gate; /* the last: [1, width], or none */
} fr_experts;
size_t fr_experts_bytes(const fr_experts *e, int64_t rows, int64_t width);
/* delta[rows, width] = the experts' outputs; scratch holds fr_experts_bytes. Returns how many experts were read. */
int64_t fr_run_experts(const fr_experts *e, const float *x, float *delta, int64_t rows, int64_t width, void *scratch);

/* ---- adapters.c: low-rank changes of linear layers, by row ---- */
enum { FR_MOST_RANK = 256, FR_LANES = 16, FR_RANKS = 4, FR_OUTPUTS = 32, FR_ALIKE = 4 };
enum { FR_Q, FR_K, FR_V, FR_OUTPUT, FR_GATE, FR_UP, FR_DOWN, FR_CHANGES };
typedef struct {
    int64_t rank;         /* a multiple of FR_RANKS; 0 = the weight is not changed */
    const uint16_t *down; /* [rank / FR_RANKS, inputs / FR_LANES, FR_RANKS, FR_LANES] numbers of 16 bits */
    const uint16_t *up;   /* [outputs / FR_OUTPUTS, rank, FR_OUTPUTS] likewise; zeros fill up what is not whole */
    float scale;          /* of what `down` gives */
} fr_change;
typedef struct {
    fr_change changes[FR_CHANGES];
} fr_adapter_layer;
/* A projection's output: y[rows, .. stride], of which `outputs` are its own. */
typedef struct {
    int64_t which;
    float *y;
    int64_t stride, outputs, rows;
} fr_adapted;
/* What one block of ranks, and one panel of outputs, of up to FR_ALIKE rows of one adapter become. */
typedef void fr_down_rows(const fr_change *change, int64_t block, const float *x, int64_t inputs, int64_t rows, float *middle,
                          int64_t stride);
typedef void fr_up_rows(const fr_change *change, int64_t panel, const float *middle, int64_t stride, float *const *y,
                        int64_t rows);
typedef struct {
    fr_down_rows *down;
    fr_up_rows *up;
} fr_adapt_path;
fr_down_rows fr_adapt_down, fr_adapt_down_avx512;
fr_up_rows fr_adapt_up, fr_adapt_up_avx512;
const fr_adapt_path *fr_chosen_adapt(void); /* dispatch.c */
/* Add the changes of up to FR_MOST_PARTS projections of x[rows, inputs], by the adapter of each row; `of` NULL = none has
 * one. `middle` has room for FR_MOST_RANK numbers of every part and row. */
void fr_adapt(const fr_adapter_layer *const *of, int64_t layer, const fr_adapted *parts, int64_t count, const float *x,
              int64_t inputs, float *middle);

/* ---- recurrent.c: layers that keep a state of fixed size in the place of keys and values ---- */
enum { FR_SHORT_CONV, FR_DELTA_NET, FR_MAMBA2, FR_MOST_TAPS = 16 };
/* A row of inputs has numbers that are convolved, gates and steps; where each begins is said below. Mamba-2 convolves
 * values, keys and queries in this order, DeltaNet queries, keys and values. */
typedef struct {
    int64_t kind, kernel, channels; /* every channel is convolved with the last `kernel` inputs of a row's own path */
    int64_t wide, convolved_at, gates_at, steps_at;
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t in_turns; /* value heads are the first of every key head, then the second; or key head by key head */
    int64_t state, norm_size; /* where its state begins in a sequence's, in numbers; how many numbers are normed together */
    fr_weights inputs, output;
    const float *taps, *bias;              /* [kernel, channels], [channels] or NULL */
    const float *rates, *step_bias, *skip; /* [value_heads]; skip is Mamba-2's */
    const float *norm;
    float least_step; /* of Mamba-2's steps */
} fr_mixer;
/* The rows of one sequence in a pass. A row's state follows from that of its parent. */
typedef struct {
    int64_t first, nodes;
    const int32_t *parents; /* [nodes] within the walk, -1 = `start` is before it; NULL = each follows the one before it */
    const float *start;     /* a state, of all layers */
    int64_t kept;
    const int32_t *kept_nodes; /* [kept] in ascending order: nodes whose states are wanted */
    float *const *states;      /* [kept] where they go */
} fr_walk;
FR_API int64_t fr_state_numbers(const fr_mixer *m); /* of one layer */
/* Rows of inputs, `wide` numbers each, through convolution and recurrence: found[rows, values] and the states that are
 * kept. Scratch holds fr_mixer_bytes. Where `found` is NULL only states are wanted. */
size_t fr_mixer_bytes(const fr_mixer *m, const fr_walk *walks, int64_t count, int64_t rows);
void fr_mix(const fr_mixer *m, float eps, float *inputs, const fr_walk *walks, int64_t count, int64_t rows, float *found,
            void *scratch);

/* ---- latent.c: attention whose keys and values are made of one short row of a token; a head's query has two parts ---- */
typedef struct {
    int64_t query_rank; /* queries are made of a short row, too; 0 = of the layer's input */
    int64_t rank, key_dim, rope_dim, value_dim; /* of the cached latent; of a head, without what rotates; of what does; .. */
    fr_weights short_queries, queries, latents; /* latents: [rank + rope_dim, width] */
    const float *query_norm, *latent_norm;
    const fr_weights *absorb, *expand; /* [heads] of [rank, key_dim] and of [value_dim, rank] */
} fr_latent;

/* ---- decoder.c: a whole pass ---- */
/* Where queries, and keys with the values behind them, lie; heads of a row end to end. */
typedef struct {
    float *q, *k;
    int64_t q_stride, k_stride;
} fr_projected;
/* Queries, of that length each, of rows first .. first + count, keys and values of all; into [rows, all outputs]. */
fr_projected fr_project(const fr_weights *qkv, int64_t queries, const float *x, int64_t rows, int64_t first, int64_t count,
                        float *into, void *scratch);

typedef struct {
    const float *attention_norm, *mlp_norm; /* [width]; NULL = rows enter as they are */
    const float *q_norm, *k_norm;           /* [head_dim], [heads, head_dim] where all heads are normed at once, or NULL */
    fr_weights qkv, output, gate_up, down;  /* without weights for qkv, or for gate_up, that part is left out */
    int64_t window;            /* 0 = everything */
    int64_t rotate;            /* by which rope, from 1 on; 0: this layer has no positions */
    const fr_experts *experts; /* in place of gate_up and down, or beside them (experts_norm), or NULL */
    const float *after_attention, *after_mlp; /* [width] norms of what these parts add, or NULL */
    const float *sinks;                       /* [heads] or NULL */
    const fr_mixer *mixer; /* in the place of attention, or NULL; such a layer has no keys and values */
    fr_weights gate;       /* what attention finds is multiplied by a sigmoid of this; or without weights */
    int64_t kv_heads, head_dim, rotary; /* rotary: numbers of a head that rotate */
    int64_t cache;       /* whose keys and values it reads, counted among the layers that have some */
    int64_t borrows;     /* 1: another layer's; it has queries only */
    const float *v_norm; /* [head_dim] or NULL */
    fr_weights input_gate, input_output; /* its own input (see fr_decoder) is multiplied by this gate; or without weights */
    const float *after_input;            /* [width] norm of what that adds */
    float scale;                         /* of the rows that leave the layer; 0 = 1 */
    const fr_latent *latent;             /* in the place of qkv, or NULL */
    /* [width] norms of a layer that has experts beside gate_up and down: of what enters the experts, of what they give,
     * and of what the dense part gives; or NULL. */
    const float *experts_norm, *after_experts, *after_dense;
} fr_layer;

typedef struct {
    int64_t layers, width, heads, vocab;
    int64_t inner, rotary; /* of the layer where they are largest */
    int64_t keyed;         /* the first layers; those behind them have no keys, values or states of their own */
    float eps, attention_scale;
    const fr_layer *layer;
    const float *final_norm;
    fr_weights head;
    fr_table embedding;
    int64_t activation, whole_norms; /* whole_norms: of queries and of keys, all heads at once */
    float embedding_scale, residual_scale, logit_scale; /* 0 = 1 */
    float attention_cap, logit_cap;                     /* 0 = none */
    /* What a token gives every layer beside the residual stream: input_width numbers for each, which are a row of this
     * table times a scale, plus the norm of a projection of what enters the first layer. */
    int64_t input_width; /* 0 = nothing */
    fr_table inputs;     /* [vocab, layers * input_width] */
    fr_weights input_projection;
    const float *input_norm; /* [input_width] */
    float input_scale;
} fr_decoder;

typedef struct {
    int64_t nodes;
    int64_t scored;               /* of them, the first: those that have logits */
    int64_t keys_only;            /* of them, the last: the last keyed layer computes keys and values of these and nothing else */
    const int64_t *tokens;        /* [nodes], or NULL; x has them embedded already, also where the model has no table */
    float *x;                     /* [nodes, width] residual stream, for the caller to read; may be NULL with a table */
    const float *cosines, *sines; /* [ropes, .. rope_stride] of each rope [positions, the model's rotary / 2] */
    int64_t rope_stride;
    const int32_t *position;      /* [nodes] which row of them */
    const int32_t *write;         /* [nodes] slot that takes the node's key and value */
    fr_reach reach;
    void *keys, *values; /* [layers, kv_heads, slots] rows, by the strides below */
    int64_t kind;        /* what they are */
    int64_t layer_stride, slot_stride; /* in numbers */
    int64_t head_stride;               /* likewise; 0 = heads of a slot lie side by side */
    const int64_t *hidden_layers; /* [hidden_count] layers whose input is wanted */
    float *const *hidden;         /* [hidden_count] -> [nodes, width] */
    int64_t hidden_count;
    float *const *kept; /* [hidden_count] -> [slots, width]: the same rows again, by slot; or NULL */
    float *normed; /* [nodes, width] after the last norm, or NULL */
    float *logits; /* [scored, vocab] or NULL */
    int32_t *tops; /* [scored] where each row of logits is largest, the first on a tie, -1 = it holds NaN; or NULL */
    int32_t *active_experts; /* [layers] how many experts the layer read, or NULL */
    const fr_adapter_layer *const *adapters; /* [nodes] -> the first of these layers in each row's adapter, or NULL; or NULL */
    const fr_walk *walks; /* [walk_count] of models with recurrent layers */
    int64_t walk_count;
    float *inputs;          /* by recurrent layer, the inputs of the first `replayed` rows, for fr_replay */
    int64_t replayed;
} fr_pass;

/* Rows [nodes, width] of a layer with latents: cached rows into their slots, and queries of the first n, [n, heads, rank +
 * rope_dim]. Then what attention finds of latents, [n, heads, rank] -> [n, heads * value_dim], within the scratch. */
size_t fr_latent_bytes(const fr_latent *l, int64_t heads, int64_t rows, int64_t width);
void fr_latent_project(const fr_decoder *m, const fr_pass *p, const fr_layer *layer, const float *rows, int64_t n, float *q,
                       void *scratch);
const float *fr_latent_expand(const fr_decoder *m, const fr_pass *p, const fr_layer *layer, const float *found, int64_t n,
                              void *scratch);
FR_API int64_t fr_layout(void);
FR_API int fr_decode(const fr_decoder *model, const fr_pass *pass);
/* The state behind a path of rows whose inputs were kept by a pass: 0 = done, 1 = out of memory. */
FR_API int fr_replay(const fr_decoder *model, const float *inputs, int64_t replayed, const int32_t *path, int64_t length,
                     const float *start, float *state);
FR_API int fr_linear_rows(const fr_weights *w, const float *x, float *y, int64_t rows);

/* ---- plain_run.c: passes over one node each behind another pass, each behind the token that the last has found ---- */
typedef struct {
    int64_t most;         /* passes behind the first, at most */
    double seconds;       /* none of them starts that would end later than that */
    const int64_t *stops; /* [stop_count] tokens that end a text: nothing is computed behind them */
    int64_t stop_count;
    int64_t match;        /* nor where the last `match` tokens of the text came before; 0 = that is not asked */
    int32_t *text;        /* [length + nodes of the first + most] the tokens up to the first; takes those that are found */
    int64_t length;
    float *logits;        /* [most, vocab] */
    int32_t *tops;        /* [most] as fr_pass has them */
    float *const *hidden; /* [most, hidden_count of the first] -> [width], as fr_pass has them; kept by slot like its own */
    int64_t kept;         /* of the first pass, a chain: nodes behind its root that equal what was found before them */
    int64_t count;        /* passes that were run behind it */
    double own;           /* its share of the seconds of all */
} fr_run;
FR_API int fr_decode_run(const fr_decoder *model, const fr_pass *first, fr_run *run);

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
/* The largest of the numbers that were seen, the first of equal ones, and the sum of all: none where one was NaN. */
typedef struct {
    float most, total;
    int32_t at;
} fr_best;
#define FR_NO_BEST {-__builtin_inff(), 0.0f, INT32_MAX}
void fr_note_best(const float *x, int64_t count, int64_t first, fr_best *best); /* x[0] is number `first` */
int32_t fr_best_of(const fr_best *bests, int64_t count, int64_t stride);        /* -1 where they hold no numbers */
FR_API void fr_argmax_rows(const float *x, int64_t rows, int64_t count, int32_t *out);
FR_API void fr_log_noise(const int32_t *ids, int64_t count, uint32_t low, uint32_t high, float *out);

/* ---- head.c: an EAGLE head ---- */
typedef struct {
    const float *input_norm; /* [width]; NULL in the first layer, which has an input of its own */
    const float *mlp_norm;   /* [width] */
    fr_weights qkv, output, gate_up, down;
    int64_t window; /* the last positions that a row sees; 0 = everything */
} fr_head_layer;

typedef struct {
    int64_t width, heads, kv_heads, head_dim, inner;
    int64_t features, parts; /* numbers in the features of a true row, and of how many layers they are */
    int64_t joins_token;     /* EAGLE-1: fc reads token and feature; EAGLE-3: fc reads the features of true rows */
    int64_t norm_before_residual, norm_output, depth;
    float eps, attention_scale;
    const float *token_norm, *feature_norm; /* [width]; not for EAGLE-1 */
    const float *out_norm;                  /* [width] or NULL */
    const float *input_norm, *part_norms;   /* [features] or NULL */
    fr_weights fc, lm_head;
    const fr_head_layer *layers; /* [depth] */
    fr_table embedding;
} fr_head;

typedef struct {
    int64_t rows;
    int64_t keys_only;            /* of them, the first: the last layer computes keys and values of these and nothing else */
    const int64_t *tokens;        /* [rows] */
    const float *embedded;        /* [rows, width] or NULL: look the tokens up in the head's table */
    const float *const *features; /* [rows, parts] where the features of true rows lie; NULL = the rows are drafted */
    const float *before;          /* outputs of the rows before drafted ones, [.., width] */
    const int32_t *parents;       /* [rows] which of them */
    float *out;                   /* [rows, width]; of those that have keys only, of no use */
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    const int32_t *position;      /* [rows] which row of them */
    const int32_t *write;         /* [rows] slot that takes the row's key and value */
    fr_reach reach;
    float *keys, *values; /* [kv_heads, slots, head_dim] of the first layer */
    int64_t head_stride;
    int64_t layer_stride; /* from a layer's keys to the next one's */
} fr_head_pass;

FR_API int64_t fr_head_layout(void);
FR_API int fr_head_run(const fr_head *head, const fr_head_pass *pass);
FR_API int fr_head_rank(const fr_head *head, const float *out, float *logits, const fr_top *top);

/* ---- head_draft.c: a whole draft of one sequence ---- */
typedef struct {
    int64_t fresh;                /* true rows that are new; 0 = none */
    const int64_t *tokens;        /* [fresh] */
    const float *const *features; /* [fresh, parts] */
    float *out;                   /* [fresh, width] takes the last one's output there; of none, has that of the last true row */
    int64_t base, length;         /* the sequence's first slot, and true rows that are there already */
    int64_t nodes, depth, width;  /* below the root, levels, children of a node at most */
    int64_t frontier, branch;     /* nodes of a level that are asked for children, and candidates of each */
    const double *price;          /* [prices] of 0, 1, .. nodes, in tokens; NULL = they cost nothing */
    int64_t prices;
    double level, power, shift;   /* price of a level; a log-probability v is accepted at min(0, v * power + shift) */
    const int32_t *ids;           /* [vocabulary] the target's, or NULL: the same */
    int64_t vocabulary;
    float *logits;                /* [frontier, vocabulary] scratch */
    int64_t *tree;                /* [2, nodes] tokens, and parents with the root as 0 */
    int64_t count, levels;        /* nodes of the tree, and levels that were run */
    int64_t drafted;              /* rows that were run for them */
    double expected;              /* tokens of it that should be accepted */
    double first, further;        /* seconds of the first level and of all others */
    float scale;                  /* what logits are multiplied by */
} fr_draft;

FR_API int64_t fr_draft_layout(void);
FR_API int fr_head_draft(const fr_head *head, const fr_head_pass *like, fr_draft *draft);

/* ---- suffix.c, suffix_tree.c: what may follow the end of a text ---- */
enum { FR_LOOKUP_NODES = 256, FR_LOOKUP_STEPS = 24 };
typedef struct fr_suffix fr_suffix; /* every substring of a growing text, with how often each occurs */
typedef struct {
    const double *own_hits, *own_tries; /* [5, longest] by kind and match length: of this text */
    const double *all_hits, *all_tries; /* and of all */
    int64_t longest, shortest;          /* matches that are told apart, and that count */
    double shared_tries;                /* what all texts are worth to one */
    const int64_t *stops;               /* [stop_count] tokens that end the text */
    int64_t stop_count;
    const int64_t *table;               /* [rows, kept] successors of each token, the likeliest first; NULL = none */
    const float *shares;                /* [rows, kept] their probabilities */
    int64_t rows, kept;
    double factors[2];                  /* what these are multiplied by: where nothing matches, and behind a match */
    int64_t most_steps, always;         /* of the chain: at most, and however unlikely */
    double negligible;                  /* below this survival it ends otherwise */
    int64_t nodes, depth, width;        /* of the tree: below its root, levels, children of a node at most */
    double least;                       /* survival of a node */
    const double *price;                /* [prices] of 0, 1, .. nodes, in tokens; NULL = they cost nothing */
    int64_t prices;
    int64_t steps;                      /* of the chain that was found */
    int32_t step_tokens[FR_LOOKUP_STEPS], step_kinds[FR_LOOKUP_STEPS], step_matches[FR_LOOKUP_STEPS];
    int32_t step_seconds[FR_LOOKUP_STEPS]; /* the next best continuation, -1 = none */
    double step_rates[FR_LOOKUP_STEPS], step_survivals[FR_LOOKUP_STEPS];
    int64_t count, matched;                /* nodes of the tree below its root, and matches below it */
    int32_t tokens[FR_LOOKUP_NODES + 1], parents[FR_LOOKUP_NODES + 1], depths[FR_LOOKUP_NODES + 1];
    int32_t matches[FR_LOOKUP_STEPS];
    double survivals[FR_LOOKUP_NODES]; /* of the nodes below the root */
    int64_t best, levels, next_count;  /* nodes that pay, their levels, and those of them that are below the root */
    double by_depth[FR_LOOKUP_NODES];  /* how likely these bring a path of depth 1, 2, .. */
    int32_t nexts[FR_LOOKUP_NODES];
} fr_lookup;

FR_API int64_t fr_lookup_layout(void);
FR_API fr_suffix *fr_suffix_new(void);
FR_API void fr_suffix_free(fr_suffix *text);
FR_API int fr_suffix_read(fr_suffix *text, const int32_t *fresh, int64_t count, fr_lookup *ask);
FR_API void fr_suffix_grow(const fr_suffix *text, fr_lookup *ask);

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
