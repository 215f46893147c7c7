/* The thread pool: every worker has a share of the work and takes it in chunks; whoever is done takes from the others,
 * so that a core that is busy elsewhere does less. Shares are the same for the same work, so a worker reads the weights
 * that it packed: where memory belongs to sockets, they lie on its own.
 *
 * Within a pass jobs follow each other within microseconds, and passes within tenths of a millisecond, so an idle worker
 * watches for two milliseconds before it sleeps; after that it waits in the kernel and costs nothing. A worker that comes
 * late finds the job closed and leaves: the caller waits only for those that took part. Which thread computes a chunk
 * never changes a result.
 */
#include "forerun.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum {
    FR_TURNS = 64,         /* pauses between two looks at the clock */
    FR_PAUSING = 200000,   /* nanoseconds since the last job in which an idle worker keeps its core, */
    FR_WATCHING = 2000000, /* and in which it does not sleep */
};

static struct {
    pthread_mutex_t entry; /* one job at a time */
    pthread_mutex_t lock;  /* with wake: for workers that sleep */
    pthread_cond_t wake;
    pthread_t workers[FR_MAX_THREADS];
    atomic_int threads; /* with the caller; 0 = not started */
    bool stop;
    atomic_int sleeping;
    atomic_ulong round; /* counts jobs; a change tells the workers that there is one */
    atomic_bool open;   /* the job below may be joined */
    atomic_int inside;  /* workers that look at the job or work on it */
    fr_job job;
    void *arg;
    long grain;
    int parts; /* shares of the job */
} pool = {
    .entry = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static struct {
    _Alignas(64) atomic_long next; /* first index not taken yet */
    long end;
} shares[FR_MAX_THREADS];

FR_INLINE void pause_core(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Its own share first, then those of the workers after it. */
static void take_chunks(int worker) {
    for (int i = 0; i < pool.parts; i++) {
        int share = (worker + i) % pool.parts;
        long end = shares[share].end;
        while (atomic_load_explicit(&shares[share].next, memory_order_relaxed) < end) {
            long begin = atomic_fetch_add_explicit(&shares[share].next, pool.grain, memory_order_relaxed);
            if (begin >= end) break;
            pool.job(pool.arg, begin, begin + pool.grain < end ? begin + pool.grain : end, worker);
        }
    }
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Between two passes the caller runs Python for some tenths of a millisecond. Waking a worker that sleeps takes about as
 * long, in a virtual machine longer, so it watches beyond that; after the first moment anyone else may have the core. By
 * the clock, because a pause takes ten times as long on some processors as on others. */
static unsigned long wait_for_round(unsigned long seen) {
    int64_t began = nanoseconds(), waited = 0;
    while (waited < FR_WATCHING) {
        for (int i = 0; i < FR_TURNS; i++) {
            unsigned long now = atomic_load_explicit(&pool.round, memory_order_acquire);
            if (now != seen) return now;
            pause_core();
        }
        if (waited >= FR_PAUSING) sched_yield();
        waited = nanoseconds() - began;
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return atomic_load(&pool.round);
}

typedef struct {
    int worker;
    unsigned long round;
} birth;

static birth births[FR_MAX_THREADS];

static void *work(void *arg) {
    const birth *born = arg;
    int worker = born->worker;
    unsigned long seen = born->round;
    for (;;) {
        seen = wait_for_round(seen);
        /* first be counted, then look: whoever closes the job looks at the count afterwards */
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open)) take_chunks(worker);
        bool stop = pool.stop;
        atomic_fetch_sub(&pool.inside, 1);
        if (stop) return NULL;
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

/* After a fork the workers are gone: the child works alone until it sets a number of its own. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.entry, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.threads = 0;
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.open, false);
    atomic_store(&pool.inside, 0);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

FR_API void fr_set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > FR_MAX_THREADS) threads = FR_MAX_THREADS;
    pthread_mutex_lock(&pool.entry);
    if (threads != pool.threads) {
        pool.stop = true;
        announce();
        for (int i = 1; i < pool.threads; i++) pthread_join(pool.workers[i], NULL);
        pool.stop = false;
        pool.threads = 1;
        for (int i = 1; i < threads; i++) {
            births[i] = (birth){i, atomic_load(&pool.round)};
            if (pthread_create(&pool.workers[i], NULL, work, &births[i]) != 0) break;
            pool.threads++;
        }
    }
    pthread_mutex_unlock(&pool.entry);
}

FR_API int fr_threads(void) { return pool.threads ? pool.threads : 1; }

/* Until those that took part are done. One that lost its core to another process may have ours. */
static void wait_for_workers(void) {
    int64_t began = 0;
    for (int turn = 1; atomic_load(&pool.inside) > 0; turn++) {
        pause_core();
        if (turn % FR_TURNS) continue;
        if (!began) began = nanoseconds();
        else if (nanoseconds() - began >= FR_PAUSING) sched_yield();
    }
}

void fr_parallel(fr_job job, void *arg, int64_t count, int64_t grain) {
    if (grain < 1) grain = 1;
    if (pool.threads <= 1 || count <= grain) {
        if (count > 0) job(arg, 0, count, 0);
        return;
    }
    pthread_mutex_lock(&pool.entry);
    pool.job = job;
    pool.arg = arg;
    pool.grain = grain;
    pool.parts = pool.threads;
    for (int i = 0; i < pool.parts; i++) {
        atomic_store_explicit(&shares[i].next, count * i / pool.parts, memory_order_relaxed);
        shares[i].end = count * (i + 1) / pool.parts;
    }
    atomic_store(&pool.open, true);
    announce();
    take_chunks(0);
    atomic_store(&pool.open, false);
    wait_for_workers();
    pthread_mutex_unlock(&pool.entry);
}

/* Before the memory is first written: where the system has them, whole pages of 2 MB in it become one page each. */
FR_API void fr_use_huge_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = 2 << 20, begin = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a wish: without it all is as it was */
#else
    (void)memory, (void)bytes;
#endif
}
