/* Every substring of a growing text, with how often each occurs, and what followed each. */
#ifndef FR_SUFFIX_H
#define FR_SUFFIX_H
#include "forerun.h"

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

/* -1 = there is none */
int32_t fr_suffix_edge(const fr_suffix *text, int32_t state, int32_t token);
/* 1 = out of memory, and the text is of no use any more */
int fr_suffix_add(fr_suffix *text, int32_t token);
/* The longest suffix of these that anything followed. */
place_t fr_suffix_shorten(const fr_suffix *text, int32_t state, int32_t length);
/* Where the end of the text came before, and where a shorter one did, more often. */
place_t fr_suffix_earlier(const fr_suffix *text);
place_t fr_suffix_shorter(const fr_suffix *text, place_t place);
/* What followed a place, the most frequent first, and of those the most recent; returns how many. */
int fr_suffix_continuations(const fr_suffix *text, place_t place, continuation_t *found);

#endif
