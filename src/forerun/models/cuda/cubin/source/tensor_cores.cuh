// Tensor-core instructions, and where in shared memory their operands lie.
#pragma once
#include <stdint.h>

#include "wgmma.cuh"  // made by tools/cubins.py

// Lines of 128 bytes in groups of eight, their pieces of 16 bytes exchanged (the 128-byte swizzle).
// The lower half of the description: the upper one is the same for all (tools/cubins.py).
__device__ __forceinline__ uint32_t describe(uint32_t address) { return 0x10000 | (address >> 4); }

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The sums are written by instructions that run on: nothing may be moved across this.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ void mma_bf16(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t (&found)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(address));
}

__device__ __forceinline__ uint4 load_16(uint32_t address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(address));
    return found;
}

__device__ __forceinline__ uint32_t load_4(uint32_t address) {
    uint32_t found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address));
    return found;
}

__device__ __forceinline__ float2 load_two(uint32_t address) {
    float2 found;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(address));
    return found;
}

__device__ __forceinline__ void store_4(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
