// The product of some rows with a weight of any format: one kernel from one row to as many as a pass has.
//
// A weight lies in strips of 16 outputs, which a warp multiplies, and blocks of 128 columns; the piece of a strip in a
// block is a chunk. A program has one of `groups` equal stretches of strips and one of `splits` equal stretches of the
// depth, so that every multiprocessor reads as many bytes as the others; it works through its strips in tiles. One warp
// copies chunks into shared memory, one the rows' columns, the others multiply. Where the depth is split, the last
// program to end a strip adds up its parts, in order.
//
// A row's bits do not depend on how many rows there are: the splits follow from the weight's shape; ROWS is only the width
// of the tensor cores' instruction, and instructions of single warps (BY_WARP) give the same bits as those of four
// (measured on an H200); and every number is made by the same operations in the same order, whether parts come from
// several programs or, for many rows, from one (`whole`).
#pragma once
#include "asynchronous.cuh"
#include "decode.cuh"
#include "tensor_cores.cuh"

enum Format {
    BF16 = 0,
    E4M3 = 1,
    INT8 = 2,
    E4M3_WEIGHTS = 3,
    INT4 = 4,
    INT4_ZEROS = 5,
    INT4_MINS = 6,    // GGUF's Q4_1: a scale and a minimum of each group, in 16 bits
    INT4_K = 7,       // GGUF's Q4_K: both are bytes times two numbers of a block
    BYTES_K = 8,      // the same with numbers up to 63 in a byte each: Q5_K, Q6_K, and outputs of several K types
    INT8_GROUPS = 9,  // GGUF's Q8_0
};
enum Mode { SUMS = 0, GATED = 1 };

constexpr int STRIP = 16, BLOCK = 128;  // outputs; columns

struct Args {
    const uint8_t *weights;    // [blocks, pitch, chunk bytes]
    const uint8_t *sides;      // [blocks, pitch, side bytes] scales, zero points and minima of groups
    const float *of_blocks;    // E4M3: [strips, blocks] a factor of each chunk, or null
    const float *channel;      // [outputs] a factor of each output, or null
    const double *squares;     // [rows, square_stride] sums of squares of the pieces of each row: its norm; or null
    const float *row_scales;   // E4M3: [blocks, scale_stride] what each row's 128 columns were divided by
    void *out;                 // SUMS: fp32 [rows, outputs]; GATED: bf16 [rows, outputs / 2]
    float *parts;              // sums of splits, as they lie in registers
    int *counters;             // [row tiles, strips], zero before and after
    int rows, row_tiles, outputs, strips, pitch, blocks, groups, splits, height, stages, whole, scale_stride, mode, half_scales, pieces, square_stride, depth;
    float eps;
};

template <int FORMAT_, int GROUP_, int ROWS_, int WARPS_, int STRIPS_, bool BY_WARP_, bool ROWS_FIRST_ = false,
          bool PAIRED_ = false, bool AHEAD_ = false, bool ONE_ROW_ = false>
struct Kernel {
    static constexpr int FORMAT = FORMAT_, GROUP = GROUP_, ROWS = ROWS_, WARPS = WARPS_, STRIPS = STRIPS_;
    static constexpr bool BY_WARP = BY_WARP_, rows_first = ROWS_FIRST_;
    static constexpr bool paired = PAIRED_;  // programs for two tiles of rows share their weights' copies
    static constexpr bool ahead = AHEAD_;    // weights are read from shared memory a block ahead
    static constexpr bool one_row = ONE_ROW_;
    static constexpr int regs = ROWS / 2;
    // registers are moved from the warps that copy to those that multiply
    static constexpr bool many = ROWS >= 64 || (!BY_WARP && FORMAT != E4M3);
    static constexpr int threads = WARPS * 32 + (many ? 128 : 64);
    static constexpr bool four_bits = FORMAT >= INT4 && FORMAT <= INT4_K;
    static constexpr bool grouped = FORMAT >= INT4;  // groups of columns have scales
    static constexpr bool products = FORMAT == INT4_K || FORMAT == BYTES_K;  // scales are bytes times a block's number
    static constexpr bool mins = FORMAT == INT4_MINS || products;
    static constexpr float offset = four_bits ? 16.0f : 64.0f;  // that numbers of groups with minima come with
    static constexpr bool lying = FORMAT == E4M3;  // tensor cores read weights as they lie
    static constexpr int groups = grouped ? BLOCK / GROUP : 1;  // of columns, in a block
    static constexpr int of_group = FORMAT == INT4_ZEROS || FORMAT == INT4_MINS ? 2 : 1;
    static constexpr int sides = grouped ? groups * of_group + (products ? 2 : 0) : 0;  // of 32 bytes
    static constexpr int weight_bytes = FORMAT == BF16 ? 4096 : four_bits ? 1024 : 2048;
    static constexpr int chunk = weight_bytes, side_chunk = sides * 32;  // bytes
    static constexpr int raws = weight_bytes / 512;  // 16 bytes of a thread each
    static constexpr uint32_t rows_bytes = ROWS * (FORMAT == E4M3 ? 128 : 256);
    static constexpr uint32_t scale_bytes = FORMAT == E4M3 ? ROWS * 4 : 0;  // of rows
};

__shared__ float norm_factors[256];  // of the rows of a tile

// The inverse root mean square of each row of a tile, from the sums of squares of its pieces; by all warps that multiply.
template <class K>
__device__ __forceinline__ void find_norms(const Args &args, int row_tile) {
    constexpr int threads = K::WARPS * 32;
    asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");  // all have used those of the last tile
    for (int inside = threadIdx.x; inside < K::ROWS; inside += threads) {
        const int64_t row = row_tile * K::ROWS + inside;
        if (row >= args.rows) break;
        double sum = 0.0;
        for (int i = 0; i < args.pieces; i++) sum += __ldcg(args.squares + row * args.square_stride + i);
        norm_factors[inside] = __frsqrt_rn(__fadd_rn(__fdiv_rn(float(sum), float(args.depth)), args.eps));
    }
    asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory");
}

// Shared memory: `stages` slots of rows, of weights and of the rows' scales, and two barriers for each. Addresses are
// carried along: to compute them anew takes as many instructions as to decode a quarter of a chunk.
template <class K>
struct Ring {
    uint32_t rows, weights, sides, scales, full, end;  // end: of the barriers of slots that are full
    uint32_t stages, slot_bytes, side_bytes, parity = 0;
    __device__ Ring(uint32_t base, const Args &args) : stages(args.stages) {
        slot_bytes = args.height * K::chunk;
        side_bytes = args.height * K::side_chunk;
        rows = base;
        weights = rows + stages * K::rows_bytes;
        sides = weights + stages * slot_bytes;
        scales = sides + stages * side_bytes;
        full = scales + stages * K::scale_bytes;
        end = full + stages * 8;
    }
    __device__ uint32_t empty() const { return full + stages * 8; }
    __device__ uint32_t totals() const { return end + stages * 8; }  // of a thread's registers, where all splits are its own
    __device__ __forceinline__ void advance() {
        rows += K::rows_bytes;
        weights += slot_bytes;
        sides += side_bytes;
        scales += K::scale_bytes;
        full += 8;
        if (full == end) {
            rows -= stages * K::rows_bytes;
            weights -= stages * slot_bytes;
            sides -= stages * side_bytes;
            scales -= stages * K::scale_bytes;
            full -= stages * 8;
            parity ^= 1;
        }
    }
};

// A tile of strips and of rows over one stretch of the depth: what is worked on from one set of sums to the next.
struct Stretch {
    int strip, height, begin, end, row_tile, split;
};

// The stretches of a program, one after another; false when there are no more.
template <class K>
__device__ __forceinline__ bool stretch_at(const Args &args, int index, Stretch &found) {
    if (args.whole) {  // all splits of a tile in order
        constexpr int high = K::WARPS * K::STRIPS;
        int unit = (index / args.splits) * gridDim.x + blockIdx.x, row_tiles = args.row_tiles;
        if constexpr (K::paired) {
            unit = (index / args.splits) * (gridDim.x / 2) + blockIdx.x / 2;
            row_tiles = (row_tiles + 1) / 2;
        }
        const int tile = unit / row_tiles;
        found.split = index % args.splits;
        found.row_tile = unit % row_tiles;
        if constexpr (K::paired) found.row_tile = found.row_tile * 2 + blockIdx.x % 2;
        found.strip = tile * high;
        found.height = min(high, args.strips - found.strip);
        if (found.height <= 0) return false;
    } else {
        const int group = blockIdx.x / args.splits;
        const int first = group * args.strips / args.groups, strips = (group + 1) * args.strips / args.groups - first;
        const int tiles = (strips + args.height - 1) / args.height;
        if (strips == 0 || index >= tiles * args.row_tiles) return false;
        const int tile = index % tiles;
        found.row_tile = index / tiles;
        found.split = blockIdx.x % args.splits;
        found.strip = first + tile * strips / tiles;
        found.height = first + (tile + 1) * strips / tiles - found.strip;
    }
    found.begin = found.split * args.blocks / args.splits;
    found.end = (found.split + 1) * args.blocks / args.splits;
    return true;
}

// One thread copies weights, from before the preceding kernel has ended. (A thread that also copied rows was what a product
// of few rows waited for: each copy takes it a tenth of a microsecond.)
template <class K>
__device__ void copy_weights(const Args &args, Ring<K> ring) {
    const uint64_t policy = args.row_tiles > 1 ? keep_policy() : read_once_policy();
    Stretch now;
    for (int index = 0; stretch_at<K>(args, index, now); index++) {
        int64_t place = int64_t(now.begin) * args.pitch + now.strip;
        const uint32_t bytes = now.height * K::chunk, side_bytes = now.height * K::side_chunk;
        const uint32_t half = now.height / 2 * K::chunk, rank = K::paired ? rank_of_two() : 0;
        for (int block = now.begin; block < now.end; block++, place += args.pitch, ring.advance()) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_expect(ring.full, bytes + side_bytes);
            const uint8_t *from = args.weights + place * K::chunk;
            if constexpr (K::paired) {
                const uint32_t first = rank ? half : 0, mine = rank ? bytes - half : half;
                if (mine > 0) copy_bytes_to_both(ring.weights + first, from + first, mine, ring.full, policy);
            } else {
                copy_bytes(ring.weights, from, bytes, ring.full, policy);
            }
            if constexpr (K::sides > 0)
                copy_bytes(ring.sides, args.sides + place * K::side_chunk, side_bytes, ring.full, policy);
        }
    }
}

// Another copies rows and their scales.
template <class K>
__device__ void copy_rows(const Args &args, const TensorMap *map, Ring<K> ring) {
    const uint64_t policy = keep_policy();
    wait_for_preceding_kernel();
    Stretch now;
    for (int index = 0; stretch_at<K>(args, index, now); index++) {
        const int first = now.row_tile * K::ROWS;
        const float *scales = args.row_scales + int64_t(now.begin) * args.scale_stride + first;
        for (int block = now.begin; block < now.end; block++, scales += args.scale_stride, ring.advance()) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_expect(ring.full, K::rows_bytes + K::scale_bytes);
            copy_box(ring.rows, map, 0, first, block * (K::FORMAT == E4M3 ? 1 : 2), ring.full, policy);
            if constexpr (K::FORMAT == E4M3) copy_bytes(ring.scales, scales, K::scale_bytes, ring.full, policy);
        }
    }
}

__device__ __forceinline__ float2 two_scales(uint32_t pair, int half) {
    float2 found;
    if (half) {
        asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
            : "=f"(found.x), "=f"(found.y)
            : "r"(pair));
    } else {
        found.x = __uint_as_float(pair << 16);
        found.y = __uint_as_float(pair & 0xFFFF0000);
    }
    return found;
}

// A byte of a word, from -128 to 127 in the offset notation, times a number: exact. `less`: the number times -(2^15 + 128).
template <int BYTE>
__device__ __forceinline__ float byte_times(uint32_t word, float number, float less) {
    return __fmaf_rn(__uint_as_float(__byte_perm(word, 0x47000000, 0x7404 | BYTE << 4)), number, less);
}

// What a thread has read of a chunk: its weights, and the scales and zero points of its two outputs.
template <class K>
struct Held {
    uint4 raw[K::raws];
    uint32_t side[K::sides > 0 ? K::sides : 1];

    __device__ __forceinline__ void read(const Ring<K> &ring, int strip) {
        const uint32_t chunk = ring.weights + strip * K::chunk, sides = ring.sides + strip * K::side_chunk;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < K::raws; i++) raw[i] = load_16(chunk + lane * 16 + i * 512);
#pragma unroll
        for (int i = 0; i < K::sides; i++) side[i] = load_4(sides + lane / 4 * 4 + i * 32);
    }
    // what the sums of a group are multiplied by
    __device__ __forceinline__ float2 scale(int group, int half) const {
        if constexpr (K::products) {
            const float2 of_block = two_scales(side[K::groups], 1);
            return make_float2(byte_times<0>(side[group], of_block.x, __fmul_rn(of_block.x, -32896.0f)),
                               byte_times<1>(side[group], of_block.y, __fmul_rn(of_block.y, -32896.0f)));
        } else {
            return two_scales(side[group], half);
        }
    }
    // what the sum of the group's columns of a row is multiplied by: its minimum, and what numbers are larger by
    __device__ __forceinline__ float2 low(int group, int half) const {
        float2 least;
        if constexpr (K::products) {
            const float2 of_block = two_scales(side[K::groups + 1], 1);
            least = make_float2(byte_times<2>(side[group], of_block.x, __fmul_rn(of_block.x, -32896.0f)),
                                byte_times<3>(side[group], of_block.y, __fmul_rn(of_block.y, -32896.0f)));
        } else {
            least = two_scales(side[K::groups + group], half);
        }
        const float2 by = scale(group, half);
        return make_float2(__fmaf_rn(by.x, -K::offset, -least.x), __fmaf_rn(by.y, -K::offset, -least.y));
    }
    // the registers of a step of 16 columns
    __device__ __forceinline__ void decode(uint32_t (&a)[4], int step) const {
        if constexpr (K::four_bits && K::mins) {
            const uint4 four = raw[step / 4];
            const uint32_t word = step % 4 == 0 ? four.x : step % 4 == 1 ? four.y : step % 4 == 2 ? four.z : four.w;
            a[0] = offset_int4_pair<0>(word);
            a[1] = offset_int4_pair<4>(word);
            a[2] = offset_int4_pair<8>(word);
            a[3] = offset_int4_pair<12>(word);
        } else if constexpr (K::four_bits) {
            uint32_t zero0 = 0xC308C308, zero1 = 0xC308C308;  // -(128 + 8)
            if constexpr (K::FORMAT == INT4_ZEROS) {
                const uint32_t both = side[K::groups + step * K::groups / 8];
                zero0 = __byte_perm(both, 0, 0x1010);
                zero1 = __byte_perm(both, 0, 0x3232);
            }
            const uint4 four = raw[step / 4];
            const uint32_t word = step % 4 == 0 ? four.x : step % 4 == 1 ? four.y : step % 4 == 2 ? four.z : four.w;
            a[0] = int4_pair<0>(word, zero0);
            a[1] = int4_pair<4>(word, zero1);
            a[2] = int4_pair<8>(word, zero0);
            a[3] = int4_pair<12>(word, zero1);
        } else if constexpr (K::FORMAT == BF16) {
            a[0] = raw[step].x;
            a[1] = raw[step].y;
            a[2] = raw[step].z;
            a[3] = raw[step].w;
        } else {
            const uint4 four = raw[step / 2];
            const uint32_t low = step % 2 ? four.z : four.x, high = step % 2 ? four.w : four.y;
            if constexpr (K::mins) {
                a[0] = offset_byte_pair(low);
                a[1] = offset_byte_pair(low >> 8);
                a[2] = offset_byte_pair(high);
                a[3] = offset_byte_pair(high >> 8);
            } else if constexpr (K::FORMAT == INT8 || K::FORMAT == INT8_GROUPS) {
                a[0] = int8_pair(low);
                a[1] = int8_pair(low >> 8);
                a[2] = int8_pair(high);
                a[3] = int8_pair(high >> 8);
            } else {
                a[0] = e4m3_pair(low << 8);
                a[1] = e4m3_pair(low);
                a[2] = e4m3_pair(high << 8);
                a[3] = e4m3_pair(high);
            }
        }
    }
};

// Add to the sums of outputs g and g + 8 what a group of columns has given.
template <class K>
__device__ __forceinline__ void add_group(float (&sums)[K::regs], const float (&acc)[K::regs], float2 scale) {
#pragma unroll
    for (int i = 0; i < K::regs; i++)
        if (!K::one_row || i % 2 == 0) sums[i] = __fmaf_rn(acc[i], i % 4 < 2 ? scale.x : scale.y, sums[i]);
}

template <bool FIRST, int COUNT>
__device__ __forceinline__ float (&one_of(float (&first)[COUNT], float (&second)[COUNT]))[COUNT] {
    if constexpr (FIRST) return first;
    else return second;
}

// the numbers 0 to COUNT - 1 as template arguments
template <int... NUMBERS>
struct Numbers {};
template <int COUNT, int... NUMBERS>
struct CountTo : CountTo<COUNT - 1, COUNT - 1, NUMBERS...> {};
template <int... NUMBERS>
struct CountTo<0, NUMBERS...> {
    using Type = Numbers<NUMBERS...>;
};
template <int COUNT>
using Count = typename CountTo<COUNT>::Type;

template <bool PAIRED = false>
__device__ __forceinline__ void release(uint32_t empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    if (PAIRED && threadIdx.x % 32 == 1) barrier_arrive_at_neighbour(empty);
}

// What a thread has read of a block: of COUNT strips, and of the rows.
template <class K, int COUNT>
struct Operands {
    static constexpr int tiles = K::ROWS / 8;
    Held<K> held[COUNT];
    uint32_t b[4][tiles][4];
    uint32_t rows, empty;

    __device__ __forceinline__ void read(const Ring<K> &ring) {
#pragma unroll
        for (int s = 0; s < COUNT; s++) held[s].read(ring, threadIdx.x / 32 + s * K::WARPS);
        rows = ring.rows + threadIdx.x % 8 * 128;
        empty = ring.empty();
    }
    __device__ __forceinline__ void read_rows() {
        const int lane = threadIdx.x % 32;
        const uint32_t even = (lane / 8 ^ lane % 8) * 16, odd = ((lane / 8 + 4) ^ lane % 8) * 16;
#pragma unroll
        for (int pair = 0; pair < 4; pair++)
#pragma unroll
            for (int j = 0; j < tiles; j++)
                load_matrices(b[pair][j], rows + (pair / 2) * (K::ROWS * 128) + j * 1024 + (pair % 2 ? odd : even));
    }
    // The sums of the columns of `group` into `into`, step by step.
    __device__ __forceinline__ void multiply_group(float (&into)[COUNT][K::regs], int group) const {
#pragma unroll
        for (int step = group * (8 / K::groups); step < (group + 1) * (8 / K::groups); step++) {
#pragma unroll
            for (int s = 0; s < COUNT; s++) {
                uint32_t a[4];
                held[s].decode(a, step);
#pragma unroll
                for (int j = 0; j < tiles; j++)
                    mma_bf16(&into[s][j * 4], a, b[step / 2][j][step % 2 * 2], b[step / 2][j][step % 2 * 2 + 1]);
            }
        }
    }
};

// The sums of the columns themselves, as tensor cores make them where there are more rows.
template <class K, int COUNT>
__device__ __forceinline__ void sum_group(float (&into)[K::regs], const Operands<K, COUNT> &operands, int group) {
    const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int step = group * (8 / K::groups); step < (group + 1) * (8 / K::groups); step++)
#pragma unroll
        for (int j = 0; j < K::ROWS / 8; j++)
            mma_bf16(&into[j * 4], ones, operands.b[step / 2][j][step % 2 * 2], operands.b[step / 2][j][step % 2 * 2 + 1]);
}

template <class K, int COUNT>
__device__ __forceinline__ void clear(float (&sums)[COUNT][K::regs]) {
#pragma unroll
    for (int i = 0; i < COUNT * K::regs; i++) sums[i / K::regs][i % K::regs] = 0.0f;
}

// The sums of a group that are not yet scaled and added to the others: that waits until the next group is in the works.
template <class K, int COUNT>
struct Pending {
    float acc[COUNT][K::regs];
    float2 scale[COUNT];

    __device__ __forceinline__ Pending() {
        clear<K, COUNT>(acc);
#pragma unroll
        for (int s = 0; s < COUNT; s++) scale[s] = make_float2(0.0f, 0.0f);
    }
    __device__ __forceinline__ void settle(float (&sums)[K::STRIPS][K::regs]) {
#pragma unroll
        for (int s = 0; s < COUNT; s++) add_group<K>(sums[s], acc[s], scale[s]);
    }
    __device__ __forceinline__ void begin(const Operands<K, COUNT> &operands, int group, int half) {
        clear<K, COUNT>(acc);
        operands.multiply_group(acc, group);
#pragma unroll
        for (int s = 0; s < COUNT; s++) scale[s] = operands.held[s].scale(group, half);
    }
};

// Add what the minima of a group give: before its numbers, as `HeldUnits` does.
template <class K, int COUNT>
__device__ __forceinline__ void add_minima(float (&sums)[K::STRIPS][K::regs], const Operands<K, COUNT> &operands, int group,
                                           int half) {
    float columns[K::regs];
#pragma unroll
    for (int i = 0; i < K::regs; i++) columns[i] = 0.0f;
    sum_group<K, COUNT>(columns, operands, group);
#pragma unroll
    for (int s = 0; s < COUNT; s++) add_group<K>(sums[s], columns, operands.held[s].low(group, half));
}

// COUNT strips of a warp over `blocks` blocks, by instructions of single warps: for few rows. A thread has outputs g and
// g + 8 of a strip (g = lane / 4) of rows 8j + 2t and the next (t = lane % 4). Sums start at zero. Few rows leave registers
// to read weights of four bits a block ahead, which memory delivers faster than a warp would have read and decoded them.
template <class K, int COUNT>
__device__ __forceinline__ void multiply_by_warp(float (&sums)[K::STRIPS][K::regs], int blocks, Ring<K> &ring, int half) {
    if constexpr (!K::grouped) {
        for (int block = 0; block < blocks; block++, ring.advance()) {
            Operands<K, COUNT> now;
            barrier_wait(ring.full, ring.parity);
            now.read(ring);
            now.read_rows();
            now.multiply_group(reinterpret_cast<float(&)[COUNT][K::regs]>(sums), 0);
            release(now.empty);
        }
    } else if constexpr (K::ahead) {
        Operands<K, COUNT> even, odd;
        const auto one = [&](auto &now, auto &then, bool more) {
            now.read_rows();
            if (more) {
                barrier_wait(ring.full, ring.parity);
                then.read(ring);
                ring.advance();
            }
#pragma unroll
            for (int group = 0; group < K::groups; group++) {
                Pending<K, COUNT> pending;
                if constexpr (K::mins) add_minima<K, COUNT>(sums, now, group, half);
                pending.begin(now, group, half);
                pending.settle(sums);
            }
            release(now.empty);
        };
        barrier_wait(ring.full, ring.parity);
        even.read(ring);
        ring.advance();
        int left = blocks;
        for (; left > 1; left -= 2) {
            one(even, odd, true);
            one(odd, even, left > 2);
        }
        if (left == 1) one(even, odd, false);
    } else if constexpr (K::ROWS > 8 || K::groups > 1) {
        for (int block = 0; block < blocks; block++, ring.advance()) {
            Operands<K, COUNT> now;
            barrier_wait(ring.full, ring.parity);
            now.read(ring);
            now.read_rows();
#pragma unroll
            for (int group = 0; group < K::groups; group++) {
                Pending<K, COUNT> pending;
                if constexpr (K::mins) add_minima<K, COUNT>(sums, now, group, half);
                pending.begin(now, group, half);
                pending.settle(sums);
            }
            release(now.empty);
        }
    } else {
        Operands<K, COUNT> even, odd;
        Pending<K, COUNT> even_sums, odd_sums;
        const auto one = [&](auto &now, auto &then, auto &now_sums, auto &then_sums, bool more) {
            now.read_rows();
            if (more) {
                barrier_wait(ring.full, ring.parity);
                then.read(ring);
                ring.advance();
            }
            now_sums.begin(now, 0, half);
            then_sums.settle(sums);
            release(now.empty);
        };
        barrier_wait(ring.full, ring.parity);
        even.read(ring);
        ring.advance();
        int left = blocks;
        for (; left > 1; left -= 2) {
            one(even, odd, even_sums, odd_sums, true);
            one(odd, even, odd_sums, even_sums, left > 2);
        }
        if (left == 1) {
            one(even, odd, even_sums, odd_sums, false);
            even_sums.settle(sums);
        } else {
            odd_sums.settle(sums);
        }
    }
}

// The same by instructions of four warps, whose weights go through registers. These instructions run on while the next
// weights are decoded; a unit is what has one scale: a strip's group, or all of its columns in a block. Where groups have
// minima, every other unit sums the group's columns.
template <class K>
struct HeldUnits {
    static constexpr int steps = 8 / K::groups, at_once = steps < 4 ? steps : 4, halves = steps / at_once;
    static constexpr int of_group = K::mins ? 2 : 1, of_strip = K::groups * of_group, units = K::STRIPS * of_strip;
    float (&sums)[K::STRIPS][K::regs];
    const int half;
    float acc[2][K::regs];
    uint32_t a[2][at_once][4];
    float2 scale;  // of the unit that is in the works
    uint32_t empty = 0;

    __device__ __forceinline__ HeldUnits(float (&sums)[K::STRIPS][K::regs], int half) : sums(sums), half(half) {}

    template <int PARITY, int STRIP_INDEX>
    __device__ __forceinline__ void settle() {
        if constexpr (K::grouped) {
            hold(acc[PARITY]);
            add_group<K>(sums[STRIP_INDEX], acc[PARITY], scale);
        }
    }
    // one block; PARITY: which sums its first unit has
    template <int PARITY>
    __device__ __forceinline__ void block(Ring<K> &ring, bool first_block) {
        barrier_wait(ring.full, ring.parity);
        const uint32_t right = describe(ring.rows);
        [&]<int... UNIT>(Numbers<UNIT...>) {
            Held<K> held;
            (unit<PARITY, UNIT>(held, ring, right, first_block), ...);
        }(Count<units>());
        empty = ring.empty();
        ring.advance();
    }
    template <int PARITY, int UNIT>
    __device__ __forceinline__ void unit(Held<K> &held, const Ring<K> &ring, uint32_t right, bool first_block) {
        constexpr int strip = UNIT / of_strip, group = UNIT % of_strip / of_group, parity = (PARITY + UNIT) % 2;
        constexpr bool columns = K::mins && UNIT % of_group == 0;  // a unit that sums columns
        if constexpr (UNIT % of_strip == 0) held.read(ring, threadIdx.x / 32 + strip * K::WARPS);
        float(&into)[K::regs] = one_of<K::grouped>(acc[parity], sums[strip]);
#pragma unroll
        for (int first = 0; first < steps; first += at_once) {
            const int which = (UNIT * halves + first / at_once) % 2;
#pragma unroll
            for (int i = 0; i < at_once; i++) {
                if constexpr (columns) a[which][i][0] = a[which][i][1] = a[which][i][2] = a[which][i][3] = ONES;
                else held.decode(a[which][i], group * steps + first + i);
            }
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < at_once; i++) {
                const int step = group * steps + first + i;
                const int add = K::grouped ? first + i > 0 : !first_block || step > 0;
                wgmma_bf16_registers<K::ROWS>(into, a[which][i], right + (step / 4) * (K::ROWS * 8) + step % 4 * 2, add);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (first == 0) {
                if constexpr (UNIT > 0) {
                    settle<1 - parity, (UNIT - 1) / of_strip>();
                } else if (!first_block) {
                    settle<1 - parity, K::STRIPS - 1>();
                    release(empty);
                }
                if constexpr (columns) scale = held.low(group, half);
                else if constexpr (K::grouped) scale = held.scale(group, half);
            }
        }
    }
    template <int PARITY>  // of the next unit, if there were one
    __device__ __forceinline__ void end() {
        wgmma_wait<0>();
        settle<1 - PARITY, K::STRIPS - 1>();
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++) hold(sums[s]);
        release(empty);
    }
};

template <class K>
__device__ __forceinline__ void multiply_held(float (&sums)[K::STRIPS][K::regs], int blocks, Ring<K> &ring, int half) {
    HeldUnits<K> units(sums, half);
    constexpr int odd = HeldUnits<K>::units % 2;
    units.template block<0>(ring, true);
    int left = blocks - 1;
    for (; left >= 2; left -= 2) {
        units.template block<odd>(ring, false);
        units.template block<0>(ring, false);
    }
    if (left) {
        units.template block<odd>(ring, false);
        units.template end<0>();
    } else {
        units.template end<odd>();
    }
}

// The same with rows and weights in e4m3, both read by the tensor cores as they lie. Tensor cores add up 128 columns, more
// than which would cost them bits; those of a block run on while the sums of the one before are scaled and added.
template <class K>
struct LyingBlocks {
    float (&sums)[K::STRIPS][K::regs];
    const float *const (&factor)[K::STRIPS];  // of this warp's chunks, block by block, or null
    float acc[2][K::STRIPS][K::regs];
    float now[2][K::STRIPS];
    int index = 0;

    __device__ __forceinline__ LyingBlocks(float (&sums)[K::STRIPS][K::regs], const float *const (&factor)[K::STRIPS])
        : sums(sums), factor(factor) {}

    template <int PARITY>
    __device__ __forceinline__ void begin(const Ring<K> &ring) {
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++) now[PARITY][s] = factor[s] == nullptr ? 1.0f : __ldg(factor[s] + index);
        index++;
        barrier_wait(ring.full, ring.parity);
        const uint32_t right = describe(ring.rows), left = describe(ring.weights + (threadIdx.x / 128) * (4 * K::chunk));
        wgmma_begin();
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++)
#pragma unroll
            for (int step = 0; step < 4; step++)
                wgmma_e4m3<K::ROWS>(acc[PARITY][s], left + s * (K::WARPS * K::chunk / 16) + step * 2, right + step * 2, step > 0);
        wgmma_commit();
    }
    template <int PARITY>
    __device__ __forceinline__ void settle(const Ring<K> &ring) {
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++) hold(acc[PARITY][s]);
#pragma unroll
        for (int j = 0; j < K::ROWS / 8; j++) {
            const float2 of_rows = load_two(ring.scales + (j * 8 + threadIdx.x % 4 * 2) * 4);
#pragma unroll
            for (int s = 0; s < K::STRIPS; s++) {
                const float x = __fmul_rn(of_rows.x, now[PARITY][s]), y = __fmul_rn(of_rows.y, now[PARITY][s]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[s][j * 4 + i] = __fmaf_rn(acc[PARITY][s][j * 4 + i], i % 2 ? y : x, sums[s][j * 4 + i]);
            }
        }
        release(ring.empty());
    }
};

// For many rows the rows are the first operand, and the weights of a tile the second: a thread then has two rows, and
// needs two of their scales instead of one for every other number. Bits are the same.
template <class K>
struct RowsFirst {
    float (&sums)[K::regs];
    const float *factor;  // of the tile's chunks, block by block, or null
    float acc[2][K::regs];
    float now[2];
    int index = 0;

    __device__ __forceinline__ RowsFirst(float (&sums)[K::regs], const float *factor) : sums(sums), factor(factor) {}

    template <int PARITY>
    __device__ __forceinline__ void begin(const Ring<K> &ring) {
        now[PARITY] = factor == nullptr ? 1.0f : __ldg(factor + index++);
        barrier_wait(ring.full, ring.parity);
        const uint32_t left = describe(ring.rows + (threadIdx.x / 128) * 8192), right = describe(ring.weights);
        wgmma_begin();
#pragma unroll
        for (int step = 0; step < 4; step++) wgmma_e4m3<K::ROWS>(acc[PARITY], left + step * 2, right + step * 2, step > 0);
        wgmma_commit();
    }
    template <int PARITY>
    __device__ __forceinline__ void settle(const Ring<K> &ring) {
        const uint32_t own = ring.scales + ((threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4) * 4;
        const float x = __fmul_rn(__uint_as_float(load_4(own)), now[PARITY]);
        const float y = __fmul_rn(__uint_as_float(load_4(own + 32)), now[PARITY]);
        hold(acc[PARITY]);
#pragma unroll
        for (int i = 0; i < K::regs; i++) sums[i] = __fmaf_rn(acc[PARITY][i], i % 4 < 2 ? x : y, sums[i]);
        release<K::paired>(ring.empty());
    }
};

// Two blocks in the works at a time: `Blocks` begins one while the one before is settled.
template <class Blocks, class K>
__device__ __forceinline__ void in_turn(Blocks &blocks, int count, Ring<K> &ring) {
    auto behind = ring;  // the block that is in the works
    blocks.template begin<0>(ring);
    ring.advance();
    for (; count > 2; count -= 2) {
        blocks.template begin<1>(ring);
        wgmma_wait<1>();
        blocks.template settle<0>(behind);
        behind = ring;
        ring.advance();
        blocks.template begin<0>(ring);
        wgmma_wait<1>();
        blocks.template settle<1>(behind);
        behind = ring;
        ring.advance();
    }
    if (count == 2) {
        blocks.template begin<1>(ring);
        wgmma_wait<1>();
        blocks.template settle<0>(behind);
        wgmma_wait<0>();
        blocks.template settle<1>(ring);
        ring.advance();
    } else {
        wgmma_wait<0>();
        blocks.template settle<0>(behind);
    }
}

// What a warp does with the sums of a strip.
template <class K>
struct Finish {
    const Args &args;
    const Stretch &now;
    int strip, live;  // rows of this tile of rows
    static constexpr int regs = K::regs;

    __device__ bool lives(int i) const { return K::rows_first || i / 4 * 8 < live; }

    __device__ float *part(int split) const {
        const int64_t place = (int64_t(now.row_tile) * args.strips + strip) * args.splits + split;
        return args.parts + place * (regs * 32) + threadIdx.x % 32;
    }
    __device__ void leave(const float (&sums)[regs]) const {
        float *into = part(now.split);
#pragma unroll
        for (int i = 0; i < regs; i++)
            if (lives(i)) __stcg(into + i * 32, sums[i]);
    }
    __device__ void add_up(float (&sums)[regs]) const {
#pragma unroll
        for (int i = 0; i < regs; i++) sums[i] = 0.0f;
        for (int split = 0; split < args.splits; split++) {
            const float *from = part(split);
#pragma unroll
            for (int i = 0; i < regs; i++)
                if (lives(i)) sums[i] = __fadd_rn(sums[i], __ldcg(from + i * 32));
        }
    }
    // False where another program, or a later stretch, ends this strip; else the sums of all its splits, from zero in order.
    // `own`: where this thread keeps its totals.
    __device__ bool total(float (&sums)[regs], uint32_t own) const {
        if (args.splits == 1) return true;
        if (args.whole) {
            const bool last = now.split + 1 == args.splits;
#pragma unroll
            for (int i = 0; i < regs; i++) {
                const uint32_t place = own + i * (K::WARPS * 128);
                sums[i] = __fadd_rn(now.split == 0 ? 0.0f : __uint_as_float(load_4(place)), sums[i]);
                if (!last) store_4(place, sums[i]);
            }
            return last;
        }
        leave(sums);
        int before = 0;
        int *counter = args.counters + now.row_tile * args.strips + strip;
        __threadfence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) before = atomicAdd(counter, 1);
        before = __shfl_sync(0xFFFFFFFF, before, 0);
        if (before != args.splits - 1) return false;
        __threadfence();
        if (threadIdx.x % 32 == 0) *counter = 0;
        add_up(sums);
        return true;
    }
    __device__ void put(float (&sums)[regs]) const {
        if constexpr (K::rows_first) put_rows(sums);
        else put_outputs(sums);
    }
    // Rows g and g + 8 of a warp's 16, outputs 8j + 2t and the next. Outputs' factors are read before anything is written:
    // behind a write every read would be waited for.
    __device__ void put_rows(float (&sums)[regs]) const {
        const int lane = threadIdx.x % 32, first = (threadIdx.x / 32) * 16 + lane / 4, n0 = now.strip * STRIP + lane % 4 * 2;
        if (args.channel != nullptr) {
            float factor[K::ROWS / 4];
#pragma unroll
            for (int i = 0; i < K::ROWS / 4; i++) factor[i] = __ldg(args.channel + min(n0 + i / 2 * 8 + i % 2, args.outputs - 1));
#pragma unroll
            for (int i = 0; i < regs; i++) sums[i] = __fmul_rn(sums[i], factor[i / 4 * 2 + i % 2]);
        }
#pragma unroll
        for (int high = 0; high < 2; high++) {
            if (first + high * 8 >= live) continue;
            const int64_t row = now.row_tile * K::ROWS + first + high * 8;
            if (args.squares != nullptr) {
                const float factor = norm_factors[row - now.row_tile * K::ROWS];
#pragma unroll
                for (int i = 0; i < regs; i++)
                    if (i / 2 % 2 == high) sums[i] = __fmul_rn(sums[i], factor);
            }
#pragma unroll
            for (int j = 0; j < K::ROWS / 8; j++) {
                const int n = n0 + j * 8;
                const float *found = sums + j * 4 + high * 2;
                if (args.mode == SUMS) {
                    float *out = static_cast<float *>(args.out) + row * args.outputs + n;
                    if (n < args.outputs) out[0] = found[0];
                    if (n + 1 < args.outputs) out[1] = found[1];
                } else if (j % 2) {
                    const int unit = (now.strip + j / 2) * (STRIP / 2) + lane % 4 * 2;
                    const uint32_t both = gated(found[-4], found[0]) | gated(found[-3], found[1]) << 16;
                    uint16_t *out = static_cast<uint16_t *>(args.out) + row * (args.outputs / 2) + unit;
                    if (unit < args.outputs / 2) *reinterpret_cast<uint32_t *>(out) = both;
                }
            }
        }
    }
    __device__ static uint32_t gated(float gate, float up) {
        uint16_t bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(gate / (1.0f + expf(-gate)) * up));
        return bits;
    }
    __device__ void put_outputs(float (&sums)[regs]) const {
        const int lane = threadIdx.x % 32, n = strip * STRIP + lane / 4;
        const float low = args.channel == nullptr || n >= args.outputs ? 1.0f : args.channel[n];
        const float high = args.channel == nullptr || n + 8 >= args.outputs ? 1.0f : args.channel[n + 8];
#pragma unroll
        for (int i = 0; i < regs; i += 4) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int inside = i * 2 + lane % 4 * 2 + odd;
                if (inside >= live) continue;
                const int64_t row = now.row_tile * K::ROWS + inside;
                float x = __fmul_rn(sums[i + odd], low), y = __fmul_rn(sums[i + odd + 2], high);
                if (args.squares != nullptr) {
                    const float factor = norm_factors[row - now.row_tile * K::ROWS];
                    x = __fmul_rn(x, factor);
                    y = __fmul_rn(y, factor);
                }
                if (args.mode == GATED) {  // packed so that a gate and its unit's other half lie in one thread
                    const int unit = strip * (STRIP / 2) + lane / 4;
                    if (unit < args.outputs / 2) static_cast<uint16_t *>(args.out)[row * (args.outputs / 2) + unit] = gated(x, y);
                } else {
                    float *out = static_cast<float *>(args.out) + row * args.outputs + n;
                    if (n < args.outputs) out[0] = x;
                    if (n + 8 < args.outputs) out[8] = y;
                }
            }
        }
    }
};

template <class K>
__device__ void consume(const Args &args, Ring<K> ring) {
    wait_for_preceding_kernel();
    const int warp = threadIdx.x / 32;
    Stretch now;
    int found = -1;  // the tile of rows whose norms are known
    for (int index = 0; stretch_at<K>(args, index, now); index++) {
        if (args.squares != nullptr && now.row_tile != found) find_norms<K>(args, found = now.row_tile);
        const int blocks = now.end - now.begin;
        float sums[K::STRIPS][K::regs];
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++)
#pragma unroll
            for (int i = 0; i < K::regs; i++) sums[s][i] = 0.0f;
        if constexpr (K::rows_first) {
            const float *factor = args.of_blocks;
            if (factor != nullptr) factor += int64_t(now.strip) * args.blocks + now.begin;
            RowsFirst<K> tile(sums[0], factor);
            in_turn(tile, blocks, ring);
        } else if constexpr (K::BY_WARP) {
            if (K::STRIPS == 2 && warp + K::WARPS < now.height) {
                multiply_by_warp<K, K::STRIPS>(sums, blocks, ring, args.half_scales);
            } else if (warp < now.height) {
                multiply_by_warp<K, 1>(sums, blocks, ring, args.half_scales);
            } else {
                for (int block = 0; block < blocks; block++, ring.advance()) {
                    barrier_wait(ring.full, ring.parity);
                    release(ring.empty());
                }
            }
        } else if constexpr (K::lying) {
            const float *factor[K::STRIPS];
#pragma unroll
            for (int s = 0; s < K::STRIPS; s++) {
                const int strip = min(now.strip + warp + s * K::WARPS, args.strips - 1);
                factor[s] = args.of_blocks == nullptr ? nullptr : args.of_blocks + int64_t(strip) * args.blocks + now.begin;
            }
            LyingBlocks<K> lying(sums, factor);
            in_turn(lying, blocks, ring);
        } else {
            multiply_held<K>(sums, blocks, ring, args.half_scales);
        }
#pragma unroll
        for (int s = 0; s < K::STRIPS; s++) {
            const int own = warp + s * K::WARPS;
            if (own < now.height || K::rows_first) {
                const Finish<K> finish{args, now, now.strip + own, min(K::ROWS, args.rows - now.row_tile * K::ROWS)};
                const uint32_t totals = ring.totals() + (s * K::regs * K::WARPS * 32 + threadIdx.x) * 4;
                if (finish.total(sums[s], totals)) finish.put(sums[s]);
            }
        }
    }
}

template <class K>
__device__ __forceinline__ void product(const Args &args, const TensorMap *map) {
    extern __shared__ uint8_t memory[];
    uint32_t base = (shared_address(memory) + 1023) & ~1023u;
    asm volatile("" : "+r"(base));  // or the compiler makes it anew for every block
    Ring<K> ring(base, args);
    if (threadIdx.x == 0) {
        auto each = ring;
        for (int i = 0; i < args.stages; i++, each.advance()) {
            barrier_init(each.full, 2);
            barrier_init(each.empty(), K::paired ? 2 * K::WARPS : K::WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
    }
    if constexpr (K::paired) sync_both();
    else __syncthreads();
    let_next_kernel_start();
    if (threadIdx.x >= K::WARPS * 32) {
        if constexpr (K::many) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == K::WARPS * 32) copy_weights<K>(args, ring);
        if (threadIdx.x == K::WARPS * 32 + 32) copy_rows<K>(args, map, ring);
    } else {
        if constexpr (K::many) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<K>(args, ring);
    }
    if constexpr (K::paired) {  // the neighbour may still write here
        __syncwarp();
        sync_both();
    }
}
