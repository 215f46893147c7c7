// One kernel per number of rows; the format is given on the command line: KIND and GROUPED.
#include "product.cuh"

constexpr bool LYING = KIND == E4M3;

#define KERNEL(NAME, ROWS, STRIPS, BY_WARP, TOGETHER)                                                                  \
    extern "C" __global__ void __launch_bounds__((Kernel<KIND, GROUPED, ROWS, 8, STRIPS, BY_WARP>::threads), TOGETHER) \
        product_##NAME(const __grid_constant__ TensorMap map, const __grid_constant__ Args args) {               \
        product<Kernel<KIND, GROUPED, ROWS, 8, STRIPS, BY_WARP>>(args, &map);                                    \
    }

// few rows: weights are read by single warps, two strips each, so that one's instructions fill the waits of the other's
#if KIND_CODE < 6
KERNEL(8, 8, 2, !LYING, 2)
KERNEL(16, 16, 2, !LYING, 2)
#else  // one program has a multiprocessor: registers to read ahead
#define AHEAD(NAME, ONE_ROW)                                                                                    \
    extern "C" __global__ void __launch_bounds__(320, 1)                                                        \
        product_##NAME(const __grid_constant__ TensorMap map, const __grid_constant__ Args args) {              \
        product<Kernel<KIND, GROUPED, 8, 8, 2, true, false, false, true, ONE_ROW>>(args, &map);                 \
    }
AHEAD(1, true)
AHEAD(8, false)
KERNEL(8_simple, 8, 2, true, 1)
KERNEL(16, 16, 2, true, 1)
#endif
KERNEL(32, 32, 2, !LYING, 1)
#if KIND_CODE == 1
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
    product_128_pairs(const __grid_constant__ TensorMap map, const __grid_constant__ Args args) {
    product<Kernel<KIND, GROUPED, 128, 8, 1, false, true, true>>(args, &map);
}
extern "C" __global__ void __launch_bounds__(384, 1)
    product_128_rows(const __grid_constant__ TensorMap map, const __grid_constant__ Args args) {
    product<Kernel<KIND, GROUPED, 128, 8, 1, false, true>>(args, &map);
}
#else
KERNEL(32_four, 32, 2, false, 1)
#endif
KERNEL(64, 64, 2, false, 1)
KERNEL(128, 128, 1, false, 1)
#if KIND_CODE < 4 && KIND_CODE != 1
KERNEL(256, 256, 1, false, 1)
#endif
