"""Drafts what followed the longest matches, in the request and in earlier answers.

A suffix automaton per request takes in all of its tokens, whoever proposed them; further ones hold
what finished requests have said. An automaton has one state per set of strings that end at the same
places of the texts; a text is added token by token at amortised constant cost (Blumer et al., "The
smallest automaton recognizing the subwords of a text", 1985; for several texts the last state goes
back to the root). An edge knows how often its token followed its state's strings. These counts are
exact for strings of at most ``max_depth`` tokens: each token is counted along the suffix links of
the longest such suffix.

How likely a token is after a context is blended from the context's suffixes, the longest first, as
in prediction by partial matching (Cleary and Witten, 1984): of a suffix that was continued ``n``
times, a token that came ``c`` times gets ``c / (n + b)`` of what is left, and ``b / (n + b)`` is
left to the shorter ones. The tree is the likeliest nodes, best first.

``csrc/drafts/suffix.cpp`` is the same in C++, to the last bit; this one serves where the extension
is missing. Knows no model and no text.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, cast

from paceline.config.speculative import SuffixConfig
from paceline.planner.drafts import Drafted, TextDrafter
from paceline.proposers.base import TargetInfo, TextProposer
from paceline.proposers.base.noise import NO_NOISE, TargetNoise, noise_of
from paceline.request.request import Request
from paceline.request.span import ROOT

NAME = "suffix"


class SuffixProposer(TextProposer):
    """See the module's docstring."""

    name = NAME
    config: SuffixConfig
    sees_matches = True

    def __init__(self, config: SuffixConfig, is_native: bool | None = None) -> None:
        super().__init__(config, is_native)
        native, depth = self._native, config.suffix_decoding_max_tree_depth
        make_automaton: Any = native.SuffixAutomaton if native else SuffixAutomaton
        self._make_text: Any = native.SuffixText if native else SuffixText
        self._make_noise: Any = native.TargetNoise if native else TargetNoise
        self._drafter = (native.SuffixRules if native else SuffixRules)(
            others_by_length(depth),
            branching=self._branching,
            min_token_prob=config.suffix_decoding_min_token_prob,
            min_path_prob=config.min_accept_prob,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
        )
        self._shared = SharedTexts(
            partial(make_automaton, depth),
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_tokens,
        )

        self._known: dict[int, list[Any]] = {}
        """By request: the automata that its text shares with others."""

    def drafters(self, requests: Sequence[Request]) -> Sequence[TextDrafter]:
        drafters = super().drafters(requests)
        for request, text in zip(requests, drafters, strict=True):
            shared = self._shared.automata(request.cache_salt)
            if shared != self._known[request.request_id]:
                self._known[request.request_id] = shared
                cast(Any, text).share(shared)
        return drafters

    def matched(self, request: Request) -> int:
        text = self._texts.get(request.request_id) or self.drafters([request])[0]
        return int(cast(Any, text).matched(request.token_ids))

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._known.pop(request.request_id, None)
        has_ended = request.finish_reason is not None  # otherwise it was preempted and comes back
        if has_ended and request.num_output_tokens:
            start = max(0, request.prompt_len - self.config.suffix_decoding_max_tree_depth)
            self._shared.add(request.cache_salt, request.token_ids[start:])

    def _open(self, request: Request) -> TextDrafter:
        self._known[request.request_id] = []
        text: TextDrafter = self._make_text(
            self._drafter,
            self.config.suffix_decoding_max_tree_depth,
            self._make_noise(*noise_of(request)),
        )
        return text


def build(config: SuffixConfig, target: TargetInfo) -> SuffixProposer:
    return SuffixProposer(config)


NUM_GENERATIONS = 2


@dataclass(slots=True)
class Generation:
    """Texts of one salt.

    Attributes:
        automaton: a :class:`~paceline.proposers.suffix.SuffixAutomaton` of them.
        num_texts: how many there are; the automaton knows their tokens.
    """

    automaton: Any
    num_texts: int = 0


class SharedTexts:
    """See the module's docstring.

    Args:
        make: an empty automaton.
        max_texts, max_tokens: most of both over all salts; no texts at all keeps nothing.
    """

    def __init__(self, make: Callable[[], Any], max_texts: int, max_tokens: int) -> None:
        self._make = make
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._salts: OrderedDict[str, list[Generation]] = OrderedDict()
        self.num_texts = 0
        self.num_tokens = 0

    def automata(self, salt: str) -> list[Any]:
        """What those of a salt have said, the newest first. They count as used."""
        generations = self._salts.get(salt)
        if generations is None:
            return []
        self._salts.move_to_end(salt)
        return [generation.automaton for generation in generations]

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep a text, or the end of one that is longer than a generation."""
        if self._max_texts == 0 or not token_ids:
            return
        most_texts = max(1, self._max_texts // NUM_GENERATIONS)
        most_tokens = max(1, self._max_tokens // NUM_GENERATIONS)
        text = list(token_ids[-most_tokens:])
        generations = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if (
            not generations
            or generations[0].num_texts >= most_texts
            or generations[0].automaton.num_tokens + len(text) > most_tokens
        ):
            generations.insert(0, Generation(self._make()))
            self._forget(generations, NUM_GENERATIONS)
        newest = generations[0]
        newest.automaton.end_text()
        newest.automaton.extend(text)
        newest.num_texts += 1
        self.num_texts += 1
        self.num_tokens += len(text)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        """Forget the older generation of the salt that was not used for longest."""
        while self.num_texts > self._max_texts or self.num_tokens > self._max_tokens:
            salt, generations = next(iter(self._salts.items()))
            self._forget(generations, len(generations) - 1)
            if not generations:
                del self._salts[salt]

    def _forget(self, generations: list[Generation], keep: int) -> None:
        for generation in generations[keep:]:
            self.num_texts -= generation.num_texts
            self.num_tokens -= generation.automaton.num_tokens
        del generations[keep:]


EMPTY, NONE = 0, -1

Edges = dict[int, list[int]]
"""By token: target state and count, what came last at the end."""
Position = tuple[int, int]
"""A state, and the length of the suffix that was matched there."""


class SuffixAutomaton:
    """See the module's docstring."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        """Tokens of all texts."""
        self._lengths = [0]
        self._links = [NONE]
        self._counts = [0]
        self._edges: list[Edges] = [{}]
        self.end_text()

    @property
    def num_states(self) -> int:
        """At most twice the tokens, and one."""
        return len(self._lengths)

    @property
    def end(self) -> Position:
        """Where the longest suffix of the text occurs, within ``max_depth``."""
        return self._active, self._active_length

    def end_text(self) -> None:
        """Let the next token begin another text."""
        self._last = EMPTY
        self._active, self._active_length = EMPTY, 0

    def extend(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Add the tokens from ``start`` on to the text."""
        for at in range(start, len(token_ids)):
            self._append(token_ids[at])

    def match(self, token_ids: Sequence[int]) -> Position:
        """Where the longest suffix of the tokens, within ``max_depth``, occurs."""
        place = EMPTY, 0
        for token in token_ids[-self.max_depth :]:
            place = self.follow(place, token)
        return place

    def follow(self, place: Position, token: int) -> Position:
        """Where the longest suffix of what is matched and a further token occurs."""
        state, length = place
        while token not in self._edges[state]:
            if state == EMPTY:
                return EMPTY, 0
            state = self._links[state]
            length = self._lengths[state]
        return self._within_depth(self._edges[state][token][0], length + 1)

    def contexts(self, place: Position) -> Iterator[tuple[int, int, Edges]]:
        """Of a matched suffix and its own suffixes: length, continuations, and which they were."""
        state, length = place
        while state != EMPTY:
            if self._counts[state]:
                yield length, self._counts[state], self._edges[state]
            state = self._links[state]
            length = self._lengths[state]

    def _within_depth(self, state: int, length: int) -> Position:
        if length > self.max_depth:
            length = self.max_depth
            if self._lengths[self._links[state]] >= length:
                state = self._links[state]
        return state, length

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        if token in self._edges[self._last]:  # as an earlier text went on
            self._last = self._split(self._last, token)
        else:
            new, state = len(self._lengths), self._last
            self._add_state(self._lengths[state] + 1, NONE, 0, {})
            while state != NONE and token not in self._edges[state]:
                self._edges[state][token] = [new, 0]
                state = self._links[state]
            self._links[new] = EMPTY if state == NONE else self._split(state, token)
            self._last = new
        self._count(token)

    def _split(self, state: int, token: int) -> int:
        """The state of a state's longest string with the token after it, and of no longer ones."""
        target, length = self._edges[state][token][0], self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        copied = {each: list(edge) for each, edge in self._edges[target].items()}
        short = self._add_state(length, self._links[target], self._counts[target], copied)
        self._links[target] = short
        while state != NONE and self._edges[state].get(token, (NONE,))[0] == target:
            self._edges[state][token][0] = short
            state = self._links[state]
        if self._active == target and self._active_length <= length:
            self._active = short
        return short

    def _add_state(self, length: int, link: int, count: int, edges: Edges) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._edges.append(edges)
        return len(self._lengths) - 1

    def _count(self, token: int) -> None:
        """Count the token after every suffix of the text before it, within the depth."""
        state = self._active
        while state != NONE:
            self._counts[state] += 1
            edges = self._edges[state]
            edge = edges.pop(token)
            edge[1] += 1
            edges[token] = edge
            state = self._links[state]
        target = self._edges[self._active][token][0]
        self._active, self._active_length = self._within_depth(target, self._active_length + 1)


class SuffixCursor:
    """Where the longest suffix of a growing text occurs, followed token by token.

    Args:
        is_own: the automaton is of the very text that is followed, and holds all of it.
    """

    def __init__(self, automaton: SuffixAutomaton, is_own: bool = False) -> None:
        self.automaton = automaton
        self._is_own = is_own
        self._place: Position = EMPTY, 0
        self._num_read = 0
        self._num_known = 0
        """Tokens of the automaton when the place was found."""

    def advance(self, token_ids: Sequence[int]) -> Position:
        """The place in the whole text; begins again where the automaton has grown meanwhile."""
        automaton = self.automaton
        if self._is_own:
            return automaton.end
        num_unread = len(token_ids) - self._num_read
        is_stale = automaton.num_tokens != self._num_known or num_unread < 0
        if is_stale or num_unread > automaton.max_depth:
            self._place = automaton.match(token_ids)
        else:
            for token in token_ids[self._num_read :]:
                self._place = automaton.follow(self._place, token)
        self._num_read, self._num_known = len(token_ids), automaton.num_tokens
        return self._place


MAX_CONTEXTS = 4
"""Suffixes that are blended."""
MAX_EDGES = 16
"""Continuations of one suffix that are looked at, the latest first; it bounds a step's time."""
LEAST_REST = 0.05
"""What is left to shorter suffixes and not worth looking for."""
USUAL_DEPTH = 8
"""Depth that every draft may have; a longer match allows more."""

# The b of contexts of so many tokens, those that were continued in several ways and those that
# were always continued alike. Greedy answers are likeliest with about half of these, sampled ones
# with about twice as much: code, chat, edits, prose and JSON by the embedded target.
_LENGTHS = (1, 2, 3, 5, 12, 16, 24)
_OTHERS = (
    (8.0, 2.5),
    (4.0, 1.4),
    (2.5, 0.6),
    (1.7, 0.45),
    (0.9, 0.2),
    (0.5, 0.1),
    (0.2, 0.05),
)

_Entry = tuple[float, int, int, int, float, int, list[Position]]
"""Minus the path probability, order, parent, token, probability, depth, the parent's places."""


def others_by_length(max_depth: int) -> list[tuple[float, float]]:
    """How much speaks against a context's own counts, by its length: (disputed, unanimous)."""
    places = (sum(length >= least for least in _LENGTHS) for length in range(max_depth + 1))
    return [_OTHERS[max(0, place - 1)] for place in places]


class SuffixRules:
    """See the module's docstring.

    Args:
        others: by the length of a context, up to the automata's depth.
        branching: most children of a node.
        min_token_prob: least share of a context's continuations that a token must have.
        min_path_prob: nodes less likely to be reached and accepted are left out.
        max_spec_factor: longest draft, as a multiple of the longest match.
    """

    def __init__(
        self,
        others: Sequence[tuple[float, float]],
        *,
        branching: int,
        min_token_prob: float,
        min_path_prob: float,
        max_spec_factor: float,
    ) -> None:
        self._others = others
        self._branching = branching
        self._min_token_prob = min_token_prob
        self._min_path_prob = min_path_prob
        self._max_spec_factor = max_spec_factor

    def draft(
        self,
        cursors: Sequence[SuffixCursor],
        token_ids: Sequence[int],
        max_nodes: int,
        max_depth: int,
        noise: TargetNoise = NO_NOISE,
    ) -> Drafted:
        """The likeliest continuations of the tokens; of equally long matches the first counts.

        Args:
            cursors: of this text, and never of another one.
            noise: of its request.
        """
        automata = [cursor.automaton for cursor in cursors]
        places = [cursor.advance(token_ids) for cursor in cursors]
        longest = max((length for length, _, _ in _contexts(automata, places)), default=0)
        most = self._max_spec_factor * longest
        if most < max_depth:
            max_depth = min(max_depth, max(USUAL_DEPTH, int(most)))
        tree: Drafted = ([], [], [])
        tokens, parents, probs = tree
        heap: list[_Entry] = []
        order = count()

        def push(parent: int, path_prob: float, depth: int, places: list[Position]) -> None:
            position = len(token_ids) + depth - 1
            for token, prob in self._children(automata, places, position, noise):
                if path_prob * prob < self._min_path_prob:
                    break
                entry = (-path_prob * prob, next(order), parent, token, prob, depth, places)
                heapq.heappush(heap, entry)

        if max_depth > 0:
            push(ROOT, 1.0, 1, places)
        while heap and len(tokens) < max_nodes:
            minus_prob, _, parent, token, prob, depth, places = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            probs.append(prob)
            if depth < max_depth:
                below = [a.follow(p, token) for a, p in zip(automata, places, strict=True)]
                push(len(tokens) - 1, -minus_prob, depth + 1, below)
        return tree

    def _children(
        self,
        automata: Sequence[SuffixAutomaton],
        places: Sequence[Position],
        position: int,
        noise: TargetNoise,
    ) -> list[tuple[int, float]]:
        """The likeliest tokens at a position, best first; of equals, the longest context's."""
        probs: dict[int, float] = {}
        rest = 1.0
        for length, total, edges in list(_contexts(automata, places))[:MAX_CONTEXTS]:
            recent = [(token, edges[token][1]) for token in islice(reversed(edges), MAX_EDGES)]
            other = self._others[length][recent[0][1] == total]
            share, least = rest / (total + other), self._min_token_prob * total
            unseen = total
            for token, times in recent:
                if times >= least:
                    probs[token] = probs.get(token, 0.0) + share * times
                unseen -= times
                if unseen < least:  # nothing of what is left can be enough
                    break
            rest *= other / (total + other)
            if rest < LEAST_REST:
                break
        probs = noise.weighed(position, probs)
        ranked = sorted(probs.items(), key=lambda item: -item[1])
        return ranked[: self._branching]


class SuffixText:
    """Drafts from a text itself and from others that are shared with it."""

    def __init__(self, drafter: SuffixRules, max_depth: int, noise: TargetNoise = NO_NOISE) -> None:
        self._drafter, self._noise = drafter, noise
        self._own = SuffixAutomaton(max_depth)
        self._cursors = [SuffixCursor(self._own, is_own=True)]

    def share(self, automata: Sequence[SuffixAutomaton]) -> None:
        """Match these too, in place of those that were shared before."""
        self._cursors[1:] = map(SuffixCursor, automata)

    def matched(self, token_ids: list[int]) -> int:
        """Tokens at the text's end that occurred before and went on."""
        self._own.extend(token_ids, self._own.num_tokens)
        automata = [cursor.automaton for cursor in self._cursors]
        places = [cursor.advance(token_ids) for cursor in self._cursors]
        return max((length for length, _, _ in _contexts(automata, places)), default=0)

    def draft(self, token_ids: list[int], max_nodes: int, max_depth: int) -> Drafted:
        self._own.extend(token_ids, self._own.num_tokens)
        return self._drafter.draft(self._cursors, token_ids, max_nodes, max_depth, self._noise)


def _contexts(
    automata: Sequence[SuffixAutomaton], places: Sequence[Position]
) -> list[tuple[int, int, Edges]]:
    """The longest suffixes at some places that were continued, the longest first."""
    contexts = [
        context
        for automaton, place in zip(automata, places, strict=True)
        for context in automaton.contexts(place)
    ]
    return sorted(contexts, key=lambda context: -context[0])
