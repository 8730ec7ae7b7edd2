"""One layer: attention and MLP, each ``h + f(h)``, with the norms where the spec places them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from bei.errors import CompileError
from bei_build.spec import AttentionSpec, LayerSpec, ModelSpec
from bei_build.torch_graph.attention import Attention, PositionModules
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.kernels import Choice
from bei_build.torch_graph.mlp import MLP
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.step import Step
from bei_build.torch_graph.storage import Storage


class Layer(nn.Module):
    """``spec``, a layer of ``model``. Raises CompileError where a decoder's layer has norms behind its parts."""

    def __init__(
        self,
        spec: LayerSpec,
        model: ModelSpec,
        choices: Mapping[AttentionSpec, Choice],
        positions: PositionModules,
        storage: Storage,
    ) -> None:
        super().__init__()
        if spec.cross_attention and spec.norms_output:
            raise CompileError(f"{model.architecture}: cross-attention with norms behind it is not supported.")
        self.spec = spec
        self._parts = ("attention", "cross_attention", "mlp") if spec.cross_attention else ("attention", "mlp")
        width = model.hidden_size
        for name, attention in (("attention", spec.attention), ("cross_attention", spec.cross_attention)):
            if attention is not None:
                kernel, is_cross = choices[attention].kernel, name == "cross_attention"
                module = Attention(
                    attention, width, kernel, positions, storage, partial_keys=model.partial_keys, cross=is_cross
                )
                self.add_module(name, module)
        if spec.mlp.experts:
            self.mlp: nn.Module = Experts(spec.mlp, width, storage)
        else:
            self.mlp = MLP(spec.mlp, width, storage)
        for name in self._norm_names():
            self.add_module(name, Norm(spec.norm, width, storage))

    def _norm_names(self) -> list[str]:
        spec = self.spec
        names = [f"{part}_post_norm" for part in self._parts] if spec.norms_output else []
        if spec.placement != "output":
            left_out = {"attention": not spec.attention_norm, "mlp": spec.parallel}
            names += [f"{part}_norm" for part in self._parts if not left_out.get(part)]
        return [*names, "second_attention_norm"] if spec.second_attention_norm else names

    def forward(self, hidden: Tensor, step: Step, encoded: Tensor | None = None) -> Tensor:
        """[T, hidden] of ``hidden`` [T, hidden]; a decoder's layer also reads the states ``encoded``."""
        spec = self.spec
        entering = shared = hidden
        for part in self._parts:
            value = hidden
            if part == "mlp" and spec.parallel:
                value = shared
            elif spec.norms_input and (part != "attention" or spec.attention_norm):
                value = shared = self._norm(f"{part}_norm", hidden)
            value = self._run(part, value, step, encoded)
            if spec.norms_output:
                value = self._norm(f"{part}_post_norm", value)
            if spec.residual_scale != 1.0:
                value = value * spec.residual_scale
            hidden = value + hidden
            if spec.placement == "post":
                hidden = self._norm(f"{part}_norm", hidden)
            if part == "attention" and spec.second_attention_norm:
                hidden = self._norm("second_attention_norm", hidden + entering)
        return hidden

    def _run(self, part: str, value: Tensor, step: Step, encoded: Tensor | None) -> Tensor:
        module = getattr(self, part)
        if part == "mlp":
            return module(value)  # type: ignore[no-any-return]
        return module(value, step, encoded if part == "cross_attention" else None)  # type: ignore[no-any-return]

    def _norm(self, name: str, value: Tensor) -> Tensor:
        return getattr(self, name)(value)  # type: ignore[no-any-return]
