/* What may follow the end of a text: by its own earlier places, and by a table of successors of single tokens.
 *
 * The same as forerun/drafters/lookup/suffix_match.py and heads/growth.py, step by step and with the same sums.
 */
#include "suffix.h"

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
