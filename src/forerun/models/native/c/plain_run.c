/* Plain decoding of one text, several passes in one call: between two passes the caller would only take the largest
 * logit as the next token, and in doing so wait for everything that the pass has evicted from the caches.
 *
 * Each pass is fr_decode's over one node, so its numbers are those of a call of its own. The caller may forget any of
 * them but the first: they write behind what it has committed.
 */
#include "forerun.h"

#include <time.h>

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int stops_at(const fr_run *run, int32_t token) {
    for (int64_t i = 0; i < run->stop_count; i++)
        if (run->stops[i] == token) return 1;
    return 0;
}

/* Did the last `match` of these tokens come before, to end before the last one? */
static int came_before(const int32_t *text, int64_t length, int64_t match) {
    if (match >= length) return 0;
    const int32_t *wanted = text + length - match;
    size_t bytes = (size_t)match * sizeof(int32_t);
    for (int64_t at = length - 1 - match; at >= 0; at--)
        if (text[at] == wanted[0] && !memcmp(text + at, wanted, bytes)) return 1;
    return 0;
}

/* Is there nothing to decide before the pass behind this token? */
static int goes_on(fr_run *run, int32_t token, double began) {
    if (token < 0 || run->count >= run->most || stops_at(run, token)) return 0;
    if (run->match) {
        int64_t length = run->length + run->count;
        run->text[length - 1] = token;
        if (came_before(run->text, length, run->match)) return 0;
    }
    double spent = seconds() - began;
    return spent + spent / (double)run->count <= run->seconds;
}

/* 0 = done, 1 = out of memory, and nothing was run. */
FR_API int fr_decode_run(const fr_decoder *m, const fr_pass *first, fr_run *run) {
    fr_pass pass = *first;
    const fr_reach *reach = &first->reach;
    int64_t token = first->tokens[0], at = reach->context[0];
    int32_t position, context, write;
    pass.tokens = &token, pass.position = &position, pass.reach.context = &context;
    pass.write = pass.reach.tails = &write;
    double began = seconds();
    run->count = 0;
    do {
        position = context = (int32_t)at;
        write = reach->first[0] + (int32_t)at;
        if (reach->pages) write = reach->pages[reach->first[0] + at / FR_PAGE] * FR_PAGE + (int32_t)(at % FR_PAGE);
        pass.reach.most = at + 1;
        pass.logits = run->logits + run->count * m->vocab;
        pass.tops = run->tops + run->count;
        if (fr_decode(m, &pass)) return run->count == 0;
        token = *pass.tops;
        run->count++, at++;
    } while (goes_on(run, (int32_t)token, began));
    return 0;
}
