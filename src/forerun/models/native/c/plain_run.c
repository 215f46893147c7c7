/* A pass of one greedy text, and plain ones behind it in the same call: between two passes the caller would only take
 * the largest logit as the next token, and in doing so wait for everything that the pass has evicted from the caches.
 *
 * Each pass is fr_decode's, so its numbers are those of a call of its own. The caller may forget those behind the first:
 * they write behind what it has committed.
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

/* Write what the first pass has shown into the text: what of its chain is right, and the token behind that. Returns
 * whether the chain ends the text. */
static int take_chain(const fr_pass *first, fr_run *run) {
    int ended = 0;
    while (run->kept + 1 < first->nodes && first->tokens[run->kept + 1] == first->tops[run->kept])
        ended |= stops_at(run, first->tops[run->kept++]);
    for (int64_t i = 0; run->match && i <= run->kept; i++) run->text[run->length + i] = first->tops[i];
    return ended;
}

/* Is there nothing to decide before the pass behind this token? */
static int goes_on(fr_run *run, int32_t token, double began) {
    if (token < 0 || run->count >= run->most || stops_at(run, token)) return 0;
    int64_t length = run->length + run->kept + 1 + run->count;
    if (run->match && came_before(run->text, length, run->match)) return 0;
    double spent = seconds() - began;
    return spent + spent / (double)(1 + run->count) <= run->seconds;
}

/* 0 = done, 1 = out of memory, and nothing was run. */
FR_API int fr_decode_run(const fr_decoder *m, const fr_pass *first, fr_run *run) {
    double began = seconds();
    run->kept = run->count = 0;
    if (fr_decode(m, first)) return 1;
    int ended = take_chain(first, run);
    double own = seconds() - began;
    const fr_reach *reach = &first->reach;
    fr_pass pass = *first;
    int64_t token = first->tops[run->kept], at = reach->context[0] + run->kept;
    int32_t position, context, write, one = 1;
    pass.nodes = pass.scored = 1, pass.tokens = &token, pass.position = &position, pass.write = &write;
    pass.reach = (fr_reach){reach->first, &context, &one, &write, 1, 0, reach->pages};
    while (!ended && goes_on(run, (int32_t)token, began)) {
        position = context = (int32_t)++at;
        write = reach->first[0] + (int32_t)at;
        if (reach->pages) write = reach->pages[reach->first[0] + at / FR_PAGE] * FR_PAGE + (int32_t)(at % FR_PAGE);
        pass.reach.most = at + 1;
        pass.logits = run->logits + run->count * m->vocab;
        pass.tops = run->tops + run->count;
        if (first->hidden_count) pass.hidden = run->hidden + run->count * first->hidden_count;
        if (fr_decode(m, &pass)) break; /* the caller will ask for it by itself */
        token = *pass.tops;
        run->count++;
        if (run->match) run->text[run->length + run->kept + run->count] = (int32_t)token;
    }
    run->own = own / (seconds() - began);
    return 0;
}
