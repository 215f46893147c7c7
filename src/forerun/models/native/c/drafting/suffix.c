/* The suffix automaton of a growing text (Blumer et al. 1985), as in forerun/drafters/lookup/suffix_index.py: with the same
 * counts and the same order, so that a draft does not depend on whether this library is there.
 *
 * Outgoing edges of all states lie in one array, each with the next older one of its state, and are found by a hash table
 * of state and token.
 */
#include "forerun.h"

#include <stdlib.h>
#include <string.h>

enum { LOOKED_AT = 48 }; /* continuations of a state that are compared: those that came up last */

typedef struct {
    int32_t length, link, count, latest, edge; /* of its longest substring, -1 = none, .., .., its newest edge or -1 */
} state_t;

typedef struct {
    int32_t state, token, to, older;
} edge_t;

struct fr_suffix {
    state_t *states;
    edge_t *edges;
    int32_t *slots; /* [mask + 1] edges by state and token, -1 = free */
    int64_t state_count, state_room, edge_count, edge_room, mask;
    int32_t last, size;
};

typedef struct {
    int32_t state, length;
} place_t;

typedef struct {
    int32_t count, latest, token, to;
} continuation_t;

enum { CLIMB = 8 }; /* states along the suffix links whose counts follow each new token */

static uint64_t place_of(const fr_suffix *text, int32_t state, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    return (key ^ key >> 29) & (uint64_t)text->mask;
}

/* -1 = there is none */
static int32_t fr_suffix_edge(const fr_suffix *text, int32_t state, int32_t token) {
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

/* Room for two more states and `edges` more edges; 1 = out of memory. */
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

/* 1 = out of memory, and the text is of no use any more */
static int fr_suffix_add(fr_suffix *text, int32_t token) {
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

/* The longest suffix of these that anything followed. */
static place_t fr_suffix_shorten(const fr_suffix *text, int32_t state, int32_t length) {
    while (state > 0 && text->states[state].edge < 0) {
        state = text->states[state].link;
        length = text->states[state].length;
    }
    return (place_t){state, length};
}

/* Where the end of the text came before, and where a shorter one did, more often. */
static place_t fr_suffix_earlier(const fr_suffix *text) {
    int32_t state = text->states[text->last].link;
    if (state < 0) state = 0;
    return fr_suffix_shorten(text, state, text->states[state].length);
}

static place_t fr_suffix_shorter(const fr_suffix *text, place_t place) {
    int32_t link = text->states[place.state].link;
    if (link < 0) link = 0;
    return fr_suffix_shorten(text, link, text->states[link].length);
}

static int is_better(const continuation_t *one, const continuation_t *other) {
    if (one->count != other->count) return one->count > other->count;
    if (one->latest != other->latest) return one->latest > other->latest;
    return one->token > other->token;
}

/* What followed a place, the most frequent first, and of those the most recent; returns how many. */
static int fr_suffix_continuations(const fr_suffix *text, place_t place, continuation_t *found) {
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

/* Trees: what may follow the end of a text, by its own earlier places and by a table of successors of single tokens.
 * The same as forerun/drafters/lookup/suffix_match.py and heads/growth.py, step by step and with the same sums. */
enum { SHORTER = 3, RANKS = 8, AT_ROOT = SHORTER * RANKS };
enum { ONCE, ALIKE, MOSTLY, DIVIDED, SECOND };
static const double ELSEWHERE = 0.5;

typedef struct {
    double rate;
    int32_t token;
    place_t above; /* where the node above it matches; state -1: it comes from the table */
} candidate_t;

/* A list of candidates below a node, of which those before `rank` are in the tree already. */
typedef struct {
    double likely, scale;
    int32_t order, parent, rank, count, own, own_count; /* the node's own candidates: in the arena */
    const int64_t *tokens;                              /* of a row of the table; NULL = its own candidates */
    const float *shares;
} waiting_t;

static double rate(const fr_lookup *ask, int kind, int64_t match) {
    int64_t i = kind * ask->longest + (match < ask->longest ? match : ask->longest) - 1;
    double shared = ask->shared_tries * ask->all_hits[i] / ask->all_tries[i];
    return (ask->own_hits[i] + shared) / (ask->own_tries[i] + ask->shared_tries);
}

static int kind_of(int64_t count, int64_t total) {
    if (count == total) return total == 1 ? ONCE : ALIKE;
    return 2 * count > total ? MOSTLY : DIVIDED;
}

static int64_t total_of(const continuation_t *found, int count) {
    int64_t total = 0;
    for (int i = 0; i < count; i++) total += found[i].count;
    return total;
}

static int stops_at(const fr_lookup *ask, int32_t token) {
    for (int64_t i = 0; i < ask->stop_count; i++)
        if (ask->stops[i] == token) return 1;
    return 0;
}

/* The likeliest chain, as long as it is worth drafting; the first few tokens always. */
static void find_chain(const fr_suffix *text, fr_lookup *ask) {
    continuation_t found[LOOKED_AT];
    place_t place = fr_suffix_earlier(text);
    double survival = 1.0;
    int64_t steps = ask->steps = 0;
    if (place.length < ask->shortest) return;
    while (steps < ask->most_steps && (survival >= ask->negligible || steps < ask->always)) {
        int count = fr_suffix_continuations(text, place, found);
        if (!count) break;
        int kind = kind_of(found[0].count, total_of(found, count));
        double own = rate(ask, kind, place.length);
        survival *= own;
        ask->step_tokens[steps] = found[0].token, ask->step_kinds[steps] = kind;
        ask->step_matches[steps] = place.length, ask->step_seconds[steps] = count > 1 ? found[1].token : -1;
        ask->step_rates[steps] = own, ask->step_survivals[steps] = survival;
        ask->steps = ++steps;
        if (stops_at(ask, found[0].token)) break;
        place = fr_suffix_shorten(text, found[0].to, place.length + 1);
    }
}

static int is_among(const candidate_t *some, int count, int32_t token) {
    for (int i = 0; i < count; i++)
        if (some[i].token == token) return 1;
    return 0;
}

/* Add the continuations of a match to others, and return what probability all of them leave. */
static double add_matches(const fr_suffix *text, const fr_lookup *ask, place_t place, candidate_t *found, int *made,
                          double left) {
    continuation_t following[LOOKED_AT];
    int count = fr_suffix_continuations(text, place, following), before = *made;
    int64_t total = total_of(following, count);
    if (count == 1 && !before) {
        found[0] = (candidate_t){rate(ask, following[0].count == 1 ? ONCE : ALIKE, place.length), following[0].token, place};
        *made = 1;
        return 1.0 - found[0].rate;
    }
    for (int i = 0; i < count && i < RANKS; i++) {
        if (is_among(found, before, following[i].token)) continue;
        int kind = i ? SECOND : kind_of(following[0].count, total);
        double doubt = i || !before ? 1.0 : ELSEWHERE, own = left * doubt * rate(ask, kind, place.length);
        left -= own;
        found[(*made)++] = (candidate_t){own, following[i].token, place};
    }
    for (int i = 1; i < *made; i++) { /* the likeliest first; of equals, those found first */
        candidate_t one = found[i];
        int at = i;
        for (; at > 0 && one.rate > found[at - 1].rate; at--) found[at] = found[at - 1];
        found[at] = one;
    }
    return left;
}

static int comes_first(const waiting_t *one, const waiting_t *other) {
    return one->likely > other->likely || (one->likely == other->likely && one->order < other->order);
}

static void push(waiting_t *heap, int *size, waiting_t one) {
    int at = (*size)++;
    for (; at > 0 && comes_first(&one, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = one;
}

static waiting_t pop(waiting_t *heap, int *size) {
    waiting_t best = heap[0], last = heap[--*size];
    int at = 0;
    for (int child; (child = 2 * at + 1) < *size; at = child) {
        if (child + 1 < *size && comes_first(&heap[child + 1], &heap[child])) child++;
        if (!comes_first(&heap[child], &last)) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return best;
}

static double share_of(const waiting_t *list, const candidate_t *arena, int rank) {
    return list->scale * (list->tokens ? (double)list->shares[rank] : arena[list->own + rank].rate);
}

/* Let the lists of candidates below a node wait: its own, which leave so much, and its token's successors. */
static void offer_lists(const fr_lookup *ask, const candidate_t *arena, int own, int count, double left, int node,
                        waiting_t *heap, int *size) {
    double survival = node ? ask->survivals[node - 1] : 1.0;
    waiting_t list = {0.0, survival, 2 * node, node, 0, count, own, count, NULL, NULL};
    if (count && (list.likely = share_of(&list, arena, 0)) > ask->least) push(heap, size, list);
    int32_t token = ask->tokens[node];
    double share = ask->table ? survival * left * ask->factors[count > 0] : 0.0;
    if (share <= ask->least || token < 0 || token >= ask->rows || !ask->kept) return;
    list.order++, list.scale = share, list.count = (int32_t)ask->kept;
    list.tokens = ask->table + token * ask->kept, list.shares = ask->shares + token * ask->kept;
    if ((list.likely = share_of(&list, arena, 0)) > ask->least) push(heap, size, list);
}

/* What may follow the root: continuations of the longest match, and of shorter ones. */
static double first_matches(const fr_suffix *text, fr_lookup *ask, candidate_t *found, int *made) {
    place_t place = fr_suffix_earlier(text);
    double left = 1.0;
    for (int i = 0; i < SHORTER && place.length >= ask->shortest; i++, place = fr_suffix_shorter(text, place))
        left = add_matches(text, ask, place, found, made, left);
    for (ask->matched = 0; ask->matched < *made; ask->matched++) ask->matches[ask->matched] = found[ask->matched].token;
    return left;
}

/* The same of a node that is a candidate. */
static double next_matches(const fr_suffix *text, const fr_lookup *ask, const candidate_t *node, candidate_t *found,
                           int *made) {
    int is_match = node->above.state >= 0;
    if (!is_match && ask->shortest != 1) return 1.0;
    int32_t edge = fr_suffix_edge(text, is_match ? node->above.state : 0, node->token);
    if (edge < 0) return 1.0;
    place_t place = fr_suffix_shorten(text, text->edges[edge].to, is_match ? node->above.length + 1 : 1);
    return add_matches(text, ask, place, found, made, 1.0);
}

static void grow(const fr_suffix *text, fr_lookup *ask) {
    candidate_t arena[AT_ROOT + RANKS * FR_LOOKUP_NODES];
    waiting_t heap[2 * FR_LOOKUP_NODES + 4];
    int32_t children[FR_LOOKUP_NODES + 1] = {0};
    int used = 0, size = 0, made = 0;
    int64_t most = ask->nodes < FR_LOOKUP_NODES ? ask->nodes : FR_LOOKUP_NODES;
    ask->parents[0] = -1, ask->depths[0] = 0, ask->count = 0;
    double left = first_matches(text, ask, arena, &made);
    if (ask->depth > 0 && most > 0) offer_lists(ask, arena, 0, made, left, 0, heap, &size);
    used = made;
    while (size && ask->count < most) {
        waiting_t list = pop(heap, &size);
        double survival = list.likely;
        candidate_t one = {0.0, 0, {-1, 0}};
        if (list.tokens) one.token = (int32_t)list.tokens[list.rank];
        else one = arena[list.own + list.rank];
        if (children[list.parent] >= ask->width) continue;
        if (++list.rank < list.count && (list.likely = share_of(&list, arena, list.rank)) > ask->least)
            push(heap, &size, list);
        if (list.tokens && is_among(arena + list.own, list.own_count, one.token)) continue;
        int node = (int)++ask->count;
        ask->tokens[node] = one.token, ask->parents[node] = list.parent;
        ask->survivals[node - 1] = survival, ask->depths[node] = ask->depths[list.parent] + 1;
        children[list.parent]++;
        if (ask->depths[node] >= ask->depth || stops_at(ask, one.token)) continue;
        made = 0;
        left = next_matches(text, ask, &one, arena + used, &made);
        offer_lists(ask, arena, used, made, left, node, heap, &size);
        used += made;
    }
}

/* Keep the first nodes, as many as gain most beyond their price, and sum up what they bring by depth. */
static void cut(fr_lookup *ask) {
    double gain = ask->price ? ask->price[0] : 0.0, best = 0.0;
    int64_t count = ask->price && ask->prices - 1 < ask->count ? ask->prices - 1 : ask->count;
    ask->best = ask->price ? 0 : count;
    for (int64_t i = 1; ask->price && i <= count; i++) {
        gain += ask->survivals[i - 1];
        if (gain - ask->price[i] > best) best = gain - ask->price[i], ask->best = i;
    }
    ask->levels = ask->next_count = 0;
    for (int64_t i = 1; i <= ask->best; i++) {
        int32_t depth = ask->depths[i];
        if (depth > ask->levels) ask->by_depth[ask->levels++] = 0.0;
        ask->by_depth[depth - 1] += ask->survivals[i - 1];
        if (depth == 1) ask->nexts[ask->next_count++] = ask->tokens[i];
    }
}

FR_API int64_t fr_lookup_layout(void) { return (int64_t)sizeof(fr_lookup); }

/* Read more of a text and find its chain; 1 = out of memory, and the text is of no use any more. */
FR_API int fr_suffix_read(fr_suffix *text, const int32_t *fresh, int64_t count, fr_lookup *ask) {
    for (int64_t i = 0; i < count; i++)
        if (fr_suffix_add(text, fresh[i])) return 1;
    find_chain(text, ask);
    return 0;
}

/* The tree below the last token, which is tokens[0], cut to what pays: nodes come in the order of their survivals. */
FR_API void fr_suffix_grow(const fr_suffix *text, fr_lookup *ask) {
    grow(text, ask);
    cut(ask);
}
