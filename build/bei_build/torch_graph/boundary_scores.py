"""Scores of pairs of boundaries for labels (``BoundaryScoresSpec``), as a layer of a head: each pair whole, as the
model's own code computes it. For references; packages for GPUs do not have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei.engine.boundaries import DIGIT, NAMES, NOWHERE, boundary_columns
from bei_build.spec.head_layers import BoundaryScoresSpec
from bei_build.spec.parts import NormSpec
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions

_LOWEST = -3e4  # of a boundary that no sequence has


class BoundaryScores(nn.Module):
    """Boundaries, labels and what scores their pairs; the names of the modules are those of the spec."""

    def __init__(self, spec: BoundaryScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._columns = boundary_columns(spec.most)
        self.reads = ("label_slots", *sorted(NAMES), self._columns)
        self._spec = spec
        hidden, width = spec.width, spec.boundary_width
        linear = partial(Linear, bias=True, options=options)
        self.bos, self.eos = options.empty(hidden), options.empty(hidden)
        self.left, self.right = linear(hidden, width), linear(hidden, width)
        self.joined = linear(2 * width, width)
        self.norm = _norm(width, spec, options)
        self.attention = nn.ModuleList(_Attention(spec, options) for _ in range(spec.attention_layers))
        self.refinement = nn.ModuleList(_Refinement(spec, options) for _ in range(spec.refinement_layers))
        for side in ("start", "end"):
            self.add_module(side, nn.ModuleDict({"boundary": linear(width, width), "label": linear(hidden, width)}))
        self.inside = nn.ModuleDict({"word": linear(hidden, width), "label": linear(hidden, width)})
        self.absent = linear(hidden, 1)
        self.pool = nn.ModuleDict({"start": linear(width, width), "end": linear(width, width)})
        self.pair = _Pair(spec, options)
        if content := spec.content_width:
            self.content = nn.ModuleDict(
                {
                    "value": linear(hidden, content),
                    "norm": _norm(content, spec, options),
                    "out": linear(content, spec.pair_width),
                }
            )

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Rows [T, (C + 1) * columns] of the token states ``value`` [T, width]."""
        tokens = torch.cat([value, self.bos[None], self.eos[None]])
        counts, ids = step["boundary_counts"].long(), step["boundary_ids"].long()
        is_boundary, is_word = (ids < most for most in (counts[:, None], counts[:, None] - 1))
        words = tokens[step["boundary_right"].long()]
        states = self._states(tokens[step["boundary_left"].long()], words, is_boundary, ids)
        labels = value[step["label_slots"].long()]
        of_start, of_end = (self._logits(side, states, labels) for side in ("start", "end"))
        last = counts[:, None] - 1
        starts = self._chosen(of_start, is_boundary, lambda places: places >= last)
        ends = self._chosen(of_end, is_boundary, lambda places: (places > last) | (places == 0))
        found = starts.shape[1]
        firsts, lasts = (
            torch.cat([chosen.expand(-1, found, found).flatten(1), torch.minimum(ids + more, last)], dim=1)
            for chosen, more in ((starts.unsqueeze(2), 0), (ends.unsqueeze(1), 1))
        )
        rows = step["boundary_rows"].long()[:, None]
        at_first, at_last = (torch.minimum(side, last) + rows for side in (firsts, lasts))  # [B, R * R + N]
        flat = states.flatten(0, 1)
        length = (lasts - firsts).float().clamp(1, DIGIT**2)
        compat = (self.pool["start"](flat[at_first]) * self.pool["end"](flat[at_last])).sum(-1, keepdim=True)
        compat = compat * self._spec.boundary_width**-0.5
        content = self._content(words, is_word, at_first, at_last, length)
        pairs = self.pair.rows(flat[at_first], flat[at_last], length, last, compat, content)
        inside = self._sums(self._logits("inside", words, labels, "word"), is_word)
        inside = (inside[at_last] - inside[at_first]) / length.sqrt().unsqueeze(-1)
        start_scores, end_scores = of_start.flatten(0, 1), of_end.flatten(0, 1)
        scores = self.pair.scores(pairs, labels) + start_scores[at_first] + end_scores[at_last] + inside.to(flat.dtype)
        sides = [
            (side, side_scores[torch.minimum(side, last) + rows])
            for side, side_scores in ((starts, start_scores), (ends, end_scores))
        ]
        return self._output(torch.cat([compat, scores], dim=-1), sides, self.absent(labels).transpose(1, 2), step)

    def states(self, value: Tensor, step: PackedStep) -> Tensor:
        """The states of boundaries, [B, N, boundary_width], for token states ``value``."""
        tokens = torch.cat([value, self.bos[None], self.eos[None]])
        ids = step["boundary_ids"].long()
        left, right = (tokens[step[f"boundary_{side}"].long()] for side in ("left", "right"))
        return self._states(left, right, ids < step["boundary_counts"].long()[:, None], ids)

    def _output(
        self, pairs: Tensor, sides: Sequence[tuple[Tensor, Tensor]], absent: Tensor, step: PackedStep
    ) -> Tensor:
        """Rows of tokens, of ``pairs`` [B, R * R + N, C + 1], the numbers [B, R] and scores [B, R, C] of starts and of
        ends, and scores of being ``absent`` [B, 1, C]."""
        found = sides[0][0].shape[1]
        square, words = torch.unflatten(pairs[:, : found**2], 1, (found, found)), pairs[:, found**2 :, 1:]
        blocks = square.transpose(2, 3)[..., step[self._columns].long()]  # [B, R, C + 1, most]
        digits = [digit for side, _ in sides for digit in (side // DIGIT, side % DIGIT)]
        numbers = torch.stack(digits, dim=-1).to(pairs.dtype)
        extras = torch.stack([*(scores for _, scores in sides), absent.expand(-1, found, -1)], dim=-1)
        beside = torch.cat([numbers[..., None, :-1], extras], dim=2)
        tokens, of_words = (step[f"boundary_{kind}"].long() for kind in ("tokens", "words"))
        rows = torch.cat([blocks, beside], dim=-1).flatten(0, 1)[tokens]
        last = numbers[..., -1:].flatten(0, 1)[tokens]
        column = torch.cat([last, words.flatten(0, 1)[of_words]], dim=1)
        return torch.cat([rows, column.unsqueeze(-1)], dim=-1).flatten(1)

    def _states(self, left: Tensor, right: Tensor, is_boundary: Tensor, ids: Tensor) -> Tensor:
        """[B, N, boundary_width] of the words on both sides."""
        states: Tensor = self.norm(self.joined(torch.cat([self.left(left), self.right(right)], dim=-1)))
        known = is_boundary.unsqueeze(-1).to(states.dtype)
        seen = is_boundary[:, None, None, :].expand(-1, -1, len(ids), -1)
        if window := self._spec.window:
            seen = seen & ((ids[:, None] - ids).abs() <= window)
        seen = seen | torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        for layer in self.attention:
            states = (states + layer(states, seen)) * known
        for layer in self.refinement:
            states = states + layer(states)
        return states * known

    def _logits(self, side: str, states: Tensor, labels: Tensor, read: str = "boundary") -> Tensor:
        """What ``labels`` [B, C, width] score ``states`` [B, N, n], [B, N, C]."""
        module = getattr(self, side)
        product: Tensor = module[read](states) @ module["label"](labels).transpose(1, 2)
        scaled: Tensor = product * self._spec.boundary_width**-0.5
        return scaled

    def _chosen(self, logits: Tensor, is_boundary: Tensor, is_useless: Callable[[Tensor], Tensor]) -> Tensor:
        """The numbers of up to ``most`` boundaries, ascending, [B, R]; NOWHERE behind the last one."""
        most = self._spec.most
        union = logits.amax(2).float().masked_fill(~is_boundary, _LOWEST)
        padded = functional.pad(union, (0, most), value=_LOWEST)
        places = padded.topk(most, dim=-1).indices
        places = places.masked_fill(is_useless(places), NOWHERE).sort(dim=-1).values
        return places[:, : logits.shape[1]]

    def _sums(self, value: Tensor, is_word: Tensor) -> Tensor:
        """Sums over the words in front of each boundary, FP32 [B * N, n], of ``value`` [B, N, n]."""
        masked = value.float() * is_word.unsqueeze(-1)
        return (masked.cumsum(1) - masked).flatten(0, 1)

    def _content(self, words: Tensor, is_word: Tensor, firsts: Tensor, lasts: Tensor, length: Tensor) -> Tensor | float:
        """What pairs read of the words between, [B, M, pair_width]."""
        if not self._spec.content_width:
            return 0.0
        sums = self._sums(self.content["value"](words), is_word)
        mean = (sums[lasts] - sums[firsts]) / length.unsqueeze(-1)
        found: Tensor = self.content["out"](self.content["norm"](mean.to(words.dtype)))
        return found


class _Pair(nn.Module):
    """Rows of pairs, and what labels score them."""

    def __init__(self, spec: BoundaryScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        linear = partial(Linear, bias=True, options=options)
        width = spec.pair_width
        self.start, self.end = linear(spec.boundary_width, width), linear(spec.boundary_width, width)
        self.length, self.prior = linear(3, width), linear(1, width)
        self.norm = _norm(width, spec, options)
        self.label = linear(spec.width, width)
        self.film = linear(width, 2 * width)
        self.out = nn.ModuleList([linear(width, spec.film_width), linear(spec.film_width, 1)])

    def rows(
        self, start: Tensor, end: Tensor, length: Tensor, num_words: Tensor, compat: Tensor, content: Tensor | float
    ) -> Tensor:
        """[B, M, pair_width]. ``num_words`` [B, 1]."""
        features = [torch.log1p(length), length / num_words, length.rsqrt()]
        total = self.start(start) + self.end(end) + self.length(torch.stack(features, dim=-1).to(start.dtype))
        found: Tensor = self.norm(total + self.prior(compat) + content)
        return found

    def scores(self, rows: Tensor, labels: Tensor) -> Tensor:
        """[B, M, C]."""
        query = self.label(labels)
        gamma, beta = (side.unsqueeze(1) for side in self.film(query).chunk(2, dim=-1))
        product = rows @ query.transpose(1, 2) * rows.shape[-1] ** -0.5
        hidden = functional.gelu(self.out[0](rows.unsqueeze(2) * (1 + gamma) + beta))
        found: Tensor = product + self.out[1](hidden).squeeze(-1)
        return found


class _Attention(nn.Module):
    """What a boundary reads of those that it sees."""

    def __init__(self, spec: BoundaryScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        width = spec.boundary_width
        self._heads = spec.num_heads
        self.norm = _norm(width, spec, options)
        self.input = Linear(width, 3 * width, True, options)
        self.output = Linear(width, width, True, options)

    def forward(self, states: Tensor, seen: Tensor) -> Tensor:
        """[B, N, width] for ``states`` of that shape; ``seen`` [B, 1, N, N]."""
        query, key, value = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part in self.input(self.norm(states)).chunk(3, dim=-1)
        )
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        result: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return result


class _Refinement(nn.Module):
    """SwiGLU of a boundary's state."""

    def __init__(self, spec: BoundaryScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self.norm = _norm(spec.boundary_width, spec, options)
        self.up = Linear(spec.boundary_width, 2 * spec.inner_width, True, options)
        self.down = Linear(spec.inner_width, spec.boundary_width, True, options)

    def forward(self, states: Tensor) -> Tensor:
        """[B, N, width] for ``states`` of that shape."""
        held, gate = self.up(self.norm(states)).chunk(2, dim=-1)
        result: Tensor = self.down(held * functional.silu(gate))
        return result


def _norm(width: int, spec: BoundaryScoresSpec, options: TensorOptions) -> Norm:
    return Norm(NormSpec(spec.eps), width, options)
