"""The recent engine time of each lane, and the length of a capped step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from math import exp, log

from bei.core import Limits
from bei.port import LANES, Lane
from bei.scheduler.next_batch import StepCosts
from bei.scheduler.queue import Entry

# Engine time counts less the longer ago it was: after so many seconds by the factor e.
_MEMORY_S = 2.0

# A wait that is longer by the time of one short text is worth this share of the rate of bulk work. A share of the best
# rate would not do: rates are so flat where steps are large that it may be reached anywhere (docs/decisions.md, "Steps
# are filled up to whole tiles").
_WORTH_OF_A_TEXT = 0.003
_SHORT_LENGTH = 32
_TYPICAL_LENGTH = 64
# A capped step may be so much longer than predicted for the typical length: longer texts pad, and would leave a part of
# its last tile empty, which costs more than it saves.
_ROOM_FOR_PADDING = 1.15
# A line goes through the costs of so many sizes, from this share of the largest efficient step on: steps that are much
# smaller tell nothing of the rates of large ones, and with fewer sizes the line would follow the noise of each.
_FITTED = 24
_SMALLEST_FITTED = 1 / 32
_LEAST_TOKEN_S = 1e-12
# Below this a step is short enough for anybody.
_LEAST_CAP_S = 0.004


class ServedShares:
    """Recent engine seconds of each lane. Not safe in threads."""

    def __init__(self) -> None:
        self._served_s: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._at_s = 0.0

    def add(self, now_s: float, seconds: float, entries: Seq[Entry]) -> None:
        """A step of ``entries`` ran for ``seconds``; each lane has its part by tokens."""
        self._fade(now_s)
        total = sum([entry.num_tokens for entry in entries])
        bulk = sum([entry.num_tokens for entry in entries if entry.lane == "bulk"])
        self._served_s["bulk"] += seconds * bulk / total
        self._served_s["interactive"] += seconds * (total - bulk) / total

    def recent_s(self, now_s: float) -> Mapping[Lane, float]:
        self._fade(now_s)
        return self._served_s

    def raise_bulk(self, bulk_share: float) -> None:
        """Count bulk work, of which none waits, as having had its share: it does not get back time that it did not ask
        for."""
        least_s = self._served_s["interactive"] * bulk_share / (1 - bulk_share)
        self._served_s["bulk"] = max(self._served_s["bulk"], least_s)

    def interactive_share(self, now_s: float, num_streams: int) -> float:
        """The share of the recent time of ``num_streams`` streams in which interactive work ran, in whole percent.

        In a steady state a faded sum is the rate times the memory.
        """
        share = self.recent_s(now_s)["interactive"] / (_MEMORY_S * num_streams)
        return round(min(1.0, share), 2)  # so it soon stands still on an idle engine, and is not told again

    def _fade(self, now_s: float) -> None:
        if now_s > self._at_s:
            factor = exp((self._at_s - now_s) / _MEMORY_S)
            self._at_s = now_s
            self._served_s["interactive"] *= factor
            self._served_s["bulk"] *= factor


def _most_tokens(costs: StepCosts, limits: Limits, length: int) -> int:
    return min(costs.largest_efficient_tokens(length), limits.max_batch_size * length)


def full_step_s(costs: StepCosts, limits: Limits) -> float:
    """The predicted seconds of the largest efficient step of sequences of a typical length."""
    length = min(_TYPICAL_LENGTH, limits.max_seq_len)
    most = _most_tokens(costs, limits, length)
    return costs.seconds(most, -(-most // length), length)


def short_step_s(costs: StepCosts, limits: Limits) -> float:
    """The predicted seconds of a step of one short sequence."""
    short = min(_SHORT_LENGTH, limits.max_seq_len)
    return costs.seconds(short, 1, short)


def capped_step_s(costs: StepCosts, limits: Limits, waiting_s: float | None = None) -> float:
    """The longest step of bulk work beside interactive work, in seconds. ``waiting_s``: the seconds of a short text
    that waits for its end, in the engine for which it waits (None: in this one).

    Of all steps of whole tiles, it is about the one for which the loss of bulk work's rate and the worth of the wait
    for its end have the smallest sum. Predicted for sequences of a typical length, with room for longer ones.

    A step of s seconds, c of them for the step itself, loses c / s of the rate. With w times s, the worth of the wait,
    the sum is smallest where s is the root of c / w. It is flat there: the smallest of the predicted sums would follow
    the noise of measurements, so c is that of a straight line through predicted steps of many sizes.
    """
    length = min(_TYPICAL_LENGTH, limits.max_seq_len)
    most = _most_tokens(costs, limits, length)
    worth = _WORTH_OF_A_TEXT / (short_step_s(costs, limits) if waiting_s is None else waiting_s)
    least = min(most, _whole(length, costs.tile))

    def seconds(tokens: int) -> float:
        return costs.seconds(tokens, -(-tokens // length), length)

    shares = (_SMALLEST_FITTED ** (place / (_FITTED - 1)) for place in range(_FITTED))
    sizes = {min(most, max(least, _whole(most * share, costs.tile))) for share in shares}
    step_s, token_s = _line([(tokens, seconds(tokens)) for tokens in sizes])
    best = ((step_s / worth) ** 0.5 - step_s) / token_s
    return max(_LEAST_CAP_S, _ROOM_FOR_PADDING * seconds(min(most, max(least, _whole(best, costs.tile)))))


def _whole(tokens: float, tile: int) -> int:
    """The nearest number of whole tiles, in tokens."""
    return max(1, round(tokens / tile)) * tile


def _line(steps: Seq[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a step and of a token, of the line with the smallest relative errors at ``steps``, of so many tokens
    and seconds each. The first is 0 or more, the second more."""
    ones = [1 / seconds for _, seconds in steps]
    tokens = [count / seconds for count, seconds in steps]
    of_ones, of_tokens = sum(one * one for one in ones), sum(one * one for one in tokens)
    of_both = sum(one * other for one, other in zip(ones, tokens, strict=True))
    spread = of_ones * of_tokens - of_both * of_both
    if spread <= 1e-9 * of_ones * of_tokens:  # steps of one size
        return 0.0, sum(tokens) / of_tokens
    step_s = max(0.0, (sum(ones) * of_tokens - sum(tokens) * of_both) / spread)
    return step_s, max(_LEAST_TOKEN_S, (sum(tokens) - step_s * of_both) / of_tokens)


def overtaking(costs: StepCosts, limits: Limits) -> float:
    """How much longer the last waiting sequence may wait than in the order of arrival: a factor, for typical sequences.

    An upper bound: a step of k sequences takes the one that is due first and k - 1 others. Were those any of the n that
    wait, with as many that come as leave, a sequence would be left after a steps with probability exp(-a(k-1)/n), and
    the one that is due first would have waited for n ln(k) / (k-1) steps, where it would be n / k in order.
    """
    length = min(_TYPICAL_LENGTH, limits.max_seq_len)
    size = min(max(2, costs.efficient_tokens(length) // length), max(2, limits.max_batch_size))
    return size * log(size) / (size - 1)
