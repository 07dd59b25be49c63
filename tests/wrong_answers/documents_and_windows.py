"""Wrong answers to the exercises of chapter 13, and what each must be told."""

import math
from itertools import accumulate

from notebooks.checks.documents_and_windows import check_first_key, check_hops, check_labels


def start_of(position, lengths):
    return max(start for start in [0, *accumulate(lengths)] if start <= position)


def first(move):
    """Right where there is no window; `move` away where there is one."""
    return lambda p, lengths, w: start_of(p, lengths) if w is None else max(start_of(p, lengths), p + 1 - w + move)


def last_of_the_document_before(p, lengths, w):
    """The first query of a document is counted to the document before."""
    return max((start for start in [0, *accumulate(lengths)] if start < p), default=0)


def negative(p, lengths, w):
    """A window of the first document reaches back before key 0."""
    return first(0)(p, lengths, w) if w is None or start_of(p, lengths) else p + 1 - w


def labels(tokens, lengths, padded):
    """Right but for padding."""
    ends = list(accumulate(lengths))
    return [-100 if i + 1 in ends else tokens[i + 1] for i in range(len(tokens))]


def before(tokens, lengths, padded):
    """Each token's label is the token before it, of the same document."""
    starts = [0, *accumulate(lengths)]
    return [-100 if i in starts else tokens[i - 1] for i in range(len(tokens))]


WRONG_ANSWERS = [
    (check_first_key, lambda p, lengths, w: 0, "of another document"),
    (check_first_key, lambda p, lengths, w: 0 if w is None else max(0, p + 1 - w), "of another document"),
    (check_first_key, lambda p, lengths, w: p - start_of(p, lengths), "place in its own document"),
    (check_first_key, lambda p, lengths, w: start_of(p, lengths), "the window begins later"),
    (check_first_key, lambda p, lengths, w: start_of(p, lengths) if w is None else p + 1 - w, "of another document"),
    (check_first_key, negative, "back before key 0"),
    (check_first_key, first(-1), "the window has 2"),
    (check_first_key, first(1), "counts the query's own"),
    (check_first_key, last_of_the_document_before, "sees itself only"),
    (check_first_key, lambda p, lengths, w: p, "whichever is later"),
    (check_first_key, lambda p, lengths, w: p + 1 - w, "TypeError"),
    (check_labels, lambda tokens, lengths, padded: [*tokens[1:], tokens[0]], "the sequence is no circle"),
    (check_labels, lambda tokens, lengths, padded: [*tokens[1:], -100], "of the next document is no label"),
    (check_labels, lambda tokens, lengths, padded: tokens, "the token after it"),
    (check_labels, labels, "padding counts in no loss"),
    (check_labels, lambda tokens, lengths, padded: [*labels(tokens, lengths, padded)[:-1], 0], "has no next one"),
    (check_labels, lambda tokens, lengths, padded: tokens[1:], "expected 9 labels"),
    (check_labels, lambda tokens, lengths, padded: [-100] * len(tokens), "next token of the same document"),
    (check_hops, lambda w, C, P: min(math.ceil(w / C), P - 1), "is no way back"),
    (check_hops, lambda w, C, P: min((w - 1) // C, P - 1), "needs the whole hop"),
    (check_hops, lambda w, C, P: min(w // C, P - 1), "round up, and the farthest"),
    (check_hops, lambda w, C, P: math.ceil((w - 1) / C), "has seen all blocks"),
    (check_hops, lambda w, C, P: P - 1, "without a window"),
    (check_hops, lambda w, C, P: min(math.ceil((w - 1) / C), P), "bring all P blocks"),
    (check_hops, lambda w, C, P: min(math.ceil((w - 1) / C) + 1, P), "has its own without a hop"),
    (check_hops, lambda w, C, P: w / C, "a hop reaches C tokens"),
    (check_hops, lambda w, C, P: "1", "expected a number, got str"),
    (check_first_key, lambda p, lengths, w: first(0)(p, lengths, w) if sum(lengths) in (8, 6, 12) else 0, "lengths ["),
    (check_first_key, lambda p, lengths, w: range(p + 1), "expected a number, got range"),
    (check_labels, before, "shifted the wrong way"),
    (check_labels, lambda tokens, lengths, padded: [tokens[-1], *tokens[:-1]], "shifted the wrong way"),
    (check_labels, lambda tokens, lengths, padded: [-100, *tokens[:-1]], "shifted the wrong way"),
    (check_labels, lambda tokens, lengths, padded: [0, *tokens[:-1]], "shifted the wrong way"),
    (check_labels, lambda tokens, lengths, padded: None, "expected a list of labels, got NoneType"),
    (check_labels, lambda tokens, lengths, padded: [str(t) for t in tokens], "expected a number, got str"),
    (check_hops, lambda w, C, P: round((w - 1) / C) if P > 1 else 0, "a hop reaches C tokens"),
    (check_hops, lambda w, C, P: {(1, 8): 0, (2, 8): 1}.get((w, C), 3), "a hop reaches C tokens"),
]
