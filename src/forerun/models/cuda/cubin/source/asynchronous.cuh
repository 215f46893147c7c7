// Barriers in shared memory, copies that complete on them, and starting before the preceding kernel has ended.
#pragma once
#include <stdint.h>

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef GUARD  // a wrong count must not hang a borrowed machine
    for (int tries = 0; !barrier_try(barrier, parity); tries++)
        if (tries > (1 << 17)) __trap();
#else
    while (!barrier_try(barrier, parity)) {}
#endif
}

__device__ __forceinline__ uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t keep_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_bytes(uint32_t into, const void *from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(into),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t into, const TensorMap *map, int x, int y, int z, uint32_t barrier,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(into),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

// The same into this program and its neighbour, at the same place and on the barrier at the same place.
__device__ __forceinline__ void copy_bytes_to_both(uint32_t into, const void *from, uint32_t bytes, uint32_t barrier,
                                                   uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4, %5;" ::"r"(into),
        "l"(from), "r"(bytes), "r"(barrier), "h"(uint16_t(3)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ uint32_t rank_of_two() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Without a scope of its own: with one, every arrival would wait for all memory (a third of a kernel's time).
__device__ __forceinline__ void barrier_arrive_at_neighbour(uint32_t barrier) {
    asm volatile(
        "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank_of_two() ^ 1)
        : "memory");
}

__device__ __forceinline__ void sync_both() {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void wait_for_preceding_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
