// One kernel per number of rows; the format is given on the command line: KIND and GROUPED.
#include "product.cuh"

constexpr bool LYING = KIND == E4M3;

#define KERNEL(ROWS, WARPS, STRIPS, BY_WARP, TOGETHER)                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32 + 32, TOGETHER)                                     \
        product_##ROWS##_##WARPS##_##STRIPS(const __grid_constant__ TensorMap map, const __grid_constant__ Args args) { \
        product<Kernel<KIND, GROUPED, ROWS, WARPS, STRIPS, BY_WARP>>(args, &map);                               \
    }

// few rows: weights are read by single warps, two strips each, so that one's instructions fill the waits of the other's
KERNEL(8, 8, 2, !LYING, 2)
KERNEL(16, 8, 2, !LYING, 2)
KERNEL(32, 8, 2, !LYING, 1)
KERNEL(64, 16, 1, false, 1)
KERNEL(64, 8, 1, false, 1)
KERNEL(128, 8, 1, false, 1)
