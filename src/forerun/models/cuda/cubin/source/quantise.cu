// Rows to e4m3, each 128 columns of a row divided by a scale of their own: the rows' bits depend on that row alone.
#include <stdint.h>

#include "asynchronous.cuh"

// One warp per 128 columns; rows bf16 [rows, depth] -> e4m3 [rows, depth], scales fp32 [depth / 128, stride].
extern "C" __global__ void quantise_rows(const uint16_t *rows, uint8_t *out, float *scales, int depth, int stride) {
    wait_for_preceding_kernel();
    let_next_kernel_start();
    const int row = blockIdx.y, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp * 128 >= depth) return;
    const int64_t place = int64_t(row) * depth + warp * 128 + lane * 4;
    const uint2 four = __ldcg(reinterpret_cast<const uint2 *>(rows + place));
    const float x[4] = {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xFFFF0000), __uint_as_float(four.y << 16),
                        __uint_as_float(four.y & 0xFFFF0000)};
    float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, apart));
    most = fmaxf(most, 1e-30f);
    const float times = __fdiv_rn(448.0f, most);
    uint32_t low, high;
    asm("{\n .reg .b16 l;\n cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n cvt.u32.u16 %0, l;\n}"
        : "=r"(low)
        : "f"(__fmul_rn(x[0], times)), "f"(__fmul_rn(x[1], times)));
    asm("{\n .reg .b16 l;\n cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n cvt.u32.u16 %0, l;\n}"
        : "=r"(high)
        : "f"(__fmul_rn(x[2], times)), "f"(__fmul_rn(x[3], times)));
    *reinterpret_cast<uint32_t *>(out + place) = low | (high << 16);
    if (lane == 0) scales[int64_t(warp) * stride + row] = __fdiv_rn(most, 448.0f);
}
