/* The thread pool: workers take chunks from a shared counter, so that a core that is busy elsewhere does less.
 *
 * Within a pass jobs follow each other within microseconds, so an idle worker watches for a moment before it sleeps;
 * after that it waits in the kernel and costs nothing. Which thread computes a chunk never changes a result.
 */
#include "forerun.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

enum { FR_MAX_THREADS = 64, FR_WATCH = 6000 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t workers[FR_MAX_THREADS];
    int threads; /* with the caller; 0 = not started */
    atomic_int sleeping;
    atomic_ulong round; /* counts jobs; a change tells the workers that there is one */
    atomic_int working; /* workers that have not finished the present job */
    atomic_long next;   /* first index not taken yet */
    fr_job job;
    void *arg;
    long count, grain;
    bool stop;
    pid_t owner;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static pthread_mutex_t entry = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */

FR_INLINE void pause_core(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_chunks(void) {
    for (;;) {
        long begin = atomic_fetch_add_explicit(&pool.next, pool.grain, memory_order_relaxed);
        if (begin >= pool.count) return;
        long end = begin + pool.grain < pool.count ? begin + pool.grain : pool.count;
        pool.job(pool.arg, begin, end);
    }
}

static unsigned long wait_for_round(unsigned long seen) {
    for (int i = 0; i < FR_WATCH; i++) {
        unsigned long now = atomic_load_explicit(&pool.round, memory_order_acquire);
        if (now != seen) return now;
        pause_core();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return atomic_load(&pool.round);
}

static void *work(void *arg) {
    unsigned long seen = (unsigned long)(uintptr_t)arg;
    for (;;) {
        seen = wait_for_round(seen);
        if (pool.stop) return NULL;
        take_chunks();
        atomic_fetch_sub_explicit(&pool.working, 1, memory_order_release);
    }
}

static void announce(void) {
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void start(int threads) {
    pool.stop = false;
    pool.threads = 1;
    pool.owner = getpid();
    for (int i = 1; i < threads; i++) {
        void *round = (void *)(uintptr_t)atomic_load(&pool.round);
        if (pthread_create(&pool.workers[i], NULL, work, round) != 0) break;
        pool.threads++;
    }
}

FR_API void fr_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > FR_MAX_THREADS) threads = FR_MAX_THREADS;
    pthread_mutex_lock(&entry);
    if (pool.threads && pool.owner == getpid()) {
        pool.stop = true;
        announce();
        for (int i = 1; i < pool.threads; i++) pthread_join(pool.workers[i], NULL);
    }
    start(threads);
    pthread_mutex_unlock(&entry);
}

FR_API int fr_threads(void) { return pool.threads ? pool.threads : 1; }

void fr_parallel(fr_job job, void *arg, int64_t count, int64_t grain) {
    if (grain < 1) grain = 1;
    /* after a fork the workers are gone: the child works alone until it sets its own number */
    if (pool.threads <= 1 || pool.owner != getpid() || count <= grain) {
        job(arg, 0, count);
        return;
    }
    pthread_mutex_lock(&entry);
    pool.job = job;
    pool.arg = arg;
    pool.count = count;
    pool.grain = grain;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.working, pool.threads - 1, memory_order_release);
    announce();
    take_chunks();
    for (int i = 0; atomic_load_explicit(&pool.working, memory_order_acquire) > 0; i++) {
        if (i < FR_WATCH) pause_core();
        else sched_yield(); /* a worker lost its core to another process: let it have ours */
    }
    pthread_mutex_unlock(&entry);
}
