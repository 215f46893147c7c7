/* The suffix automaton of a growing text (Blumer et al. 1985), as in forerun/drafters/lookup/suffix_index.py: with the same
 * counts and the same order, so that a draft does not depend on whether this library is there.
 *
 * Outgoing edges of all states lie in one array, each with the next older one of its state, and are found by a hash table
 * of state and token.
 */
#include "suffix.h"

#include <stdlib.h>
#include <string.h>

enum { CLIMB = 8 }; /* states along the suffix links whose counts follow each new token */

static uint64_t place_of(const fr_suffix *text, int32_t state, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    return (key ^ key >> 29) & (uint64_t)text->mask;
}

int32_t fr_suffix_edge(const fr_suffix *text, int32_t state, int32_t token) {
    for (uint64_t at = place_of(text, state, token);; at = (at + 1) & (uint64_t)text->mask) {
        int32_t edge = text->slots[at];
        if (edge < 0 || (text->edges[edge].state == state && text->edges[edge].token == token)) return edge;
    }
}

static void enter(fr_suffix *text, int32_t edge) {
    uint64_t at = place_of(text, text->edges[edge].state, text->edges[edge].token);
    while (text->slots[at] >= 0) at = (at + 1) & (uint64_t)text->mask;
    text->slots[at] = edge;
}

/* Room for two more states and so many more edges; 1 = out of memory. */
static int reserve(fr_suffix *text, int64_t edges) {
    if (text->state_count + 2 > text->state_room) {
        int64_t room = 2 * text->state_room;
        state_t *more = realloc(text->states, (size_t)room * sizeof *more);
        if (!more) return 1;
        text->states = more, text->state_room = room;
    }
    int64_t room = text->edge_room;
    while (text->edge_count + edges > room) room *= 2;
    if (room == text->edge_room) return 0;
    edge_t *more = realloc(text->edges, (size_t)room * sizeof *more);
    if (!more) return 1;
    text->edges = more;
    int32_t *slots = malloc(2 * (size_t)room * sizeof *slots);
    if (!slots) return 1;
    free(text->slots);
    text->slots = slots, text->edge_room = room, text->mask = 2 * room - 1;
    memset(slots, 0xff, 2 * (size_t)room * sizeof *slots);
    for (int64_t edge = 0; edge < text->edge_count; edge++) enter(text, (int32_t)edge);
    return 0;
}

static int add_edge(fr_suffix *text, int32_t state, int32_t token, int32_t to) {
    if (reserve(text, 1)) return 1;
    int32_t edge = (int32_t)text->edge_count++;
    text->edges[edge] = (edge_t){state, token, to, text->states[state].edge};
    text->states[state].edge = edge;
    enter(text, edge);
    return 0;
}

/* A new state for the longest substring of `state` and the token, which `target` stood for among others; -1 = out of
 * memory. */
static int32_t split(fr_suffix *text, int32_t state, int32_t token, int32_t target) {
    int64_t edges = 0;
    for (int32_t edge = text->states[target].edge; edge >= 0; edge = text->edges[edge].older) edges++;
    if (reserve(text, edges)) return -1;
    int32_t clone = (int32_t)text->state_count++, first = (int32_t)text->edge_count;
    int32_t at = first + (int32_t)edges - 1;
    text->states[clone] = text->states[target];
    text->states[clone].length = text->states[state].length + 1;
    text->states[clone].edge = edges ? at : -1;
    for (int32_t edge = text->states[target].edge; edge >= 0; edge = text->edges[edge].older, at--)
        text->edges[at] = (edge_t){clone, text->edges[edge].token, text->edges[edge].to, at > first ? at - 1 : -1};
    text->edge_count += edges;
    for (int64_t edge = first; edge < text->edge_count; edge++) enter(text, (int32_t)edge);
    text->states[target].link = clone;
    for (int32_t edge; state >= 0; state = text->states[state].link) {
        if ((edge = fr_suffix_edge(text, state, token)) < 0 || text->edges[edge].to != target) break;
        text->edges[edge].to = clone;
    }
    return clone;
}

int fr_suffix_add(fr_suffix *text, int32_t token) {
    if (reserve(text, 1)) return 1;
    int32_t made = (int32_t)text->state_count++, state = text->last, to = -1;
    text->size++;
    text->states[made] = (state_t){text->states[state].length + 1, 0, 1, text->size, -1};
    for (int32_t edge; state >= 0; state = text->states[state].link) {
        if ((edge = fr_suffix_edge(text, state, token)) >= 0) {
            to = text->edges[edge].to;
            break;
        }
        if (add_edge(text, state, token, made)) return 1;
    }
    if (state >= 0) {
        int32_t link = to;
        if (text->states[to].length != text->states[state].length + 1) link = split(text, state, token, to);
        if (link < 0) return 1;
        text->states[made].link = link;
        for (int climbed = 0; link > 0 && climbed < CLIMB; climbed++, link = text->states[link].link) {
            text->states[link].count++;
            text->states[link].latest = text->size;
        }
    }
    text->last = made;
    return 0;
}

FR_API void fr_suffix_free(fr_suffix *text) {
    if (!text) return;
    free(text->states);
    free(text->edges);
    free(text->slots);
    free(text);
}

/* NULL = out of memory. */
FR_API fr_suffix *fr_suffix_new(void) {
    fr_suffix *text = calloc(1, sizeof *text);
    if (!text) return NULL;
    text->state_room = text->edge_room = 256, text->mask = 511;
    text->states = malloc(256 * sizeof *text->states);
    text->edges = malloc(256 * sizeof *text->edges);
    text->slots = malloc(512 * sizeof *text->slots);
    if (!text->states || !text->edges || !text->slots) {
        fr_suffix_free(text);
        return NULL;
    }
    memset(text->slots, 0xff, 512 * sizeof *text->slots);
    text->states[0] = (state_t){0, -1, 0, 0, -1};
    text->state_count = 1;
    return text;
}

place_t fr_suffix_shorten(const fr_suffix *text, int32_t state, int32_t length) {
    while (state > 0 && text->states[state].edge < 0) {
        state = text->states[state].link;
        length = text->states[state].length;
    }
    return (place_t){state, length};
}

place_t fr_suffix_earlier(const fr_suffix *text) {
    int32_t state = text->states[text->last].link;
    if (state < 0) state = 0;
    return fr_suffix_shorten(text, state, text->states[state].length);
}

place_t fr_suffix_shorter(const fr_suffix *text, place_t place) {
    int32_t link = text->states[place.state].link;
    if (link < 0) link = 0;
    return fr_suffix_shorten(text, link, text->states[link].length);
}

static int is_better(const continuation_t *one, const continuation_t *other) {
    if (one->count != other->count) return one->count > other->count;
    if (one->latest != other->latest) return one->latest > other->latest;
    return one->token > other->token;
}

int fr_suffix_continuations(const fr_suffix *text, place_t place, continuation_t *found) {
    int count = 0;
    if (!place.state) return 0;
    for (int32_t edge = text->states[place.state].edge; edge >= 0 && count < LOOKED_AT; edge = text->edges[edge].older) {
        int32_t to = text->edges[edge].to;
        continuation_t one = {text->states[to].count, text->states[to].latest, text->edges[edge].token, to};
        int at = count++;
        for (; at > 0 && is_better(&one, &found[at - 1]); at--) found[at] = found[at - 1];
        found[at] = one;
    }
    return count;
}
