"""Names of a family's tensors in a checkpoint, and the stored tensors that are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from bei.errors import WeightsError
from bei_build.families.base import Computed, Family
from bei_build.spec.weight_shapes import Shape

# Buffers that transformers' classes compute and do not load; older versions stored them.
_BUFFERS = (
    *("rotary_emb.inv_freq", "position_ids", "token_type_ids"),
    *(".attn.bias", ".attn.masked_bias", ".attn.attention.bias", ".attn.attention.masked_bias"),  # GPT's causal masks
)

# Our names of modules before the heads.
_BACKBONE = ("embeddings.", "layers.", "final_norm", "layer_inputs.", "relative_", "convolution", "decoder.")

# transformers ties a weight to the next of its names, or leaves both alone where they are stored with other values: it
# computes with the first one present. All other alternatives name one tensor.
_TIED = ("mlm.decoder.weight", "mlm.decoder.bias", "lm_head.weight")

# The prefix of a layer in our names, and its number.
_LAYER = re.compile(r"(?:decoder\.)?layers\.(\d+)")

# Checkpoints converted from TensorFlow call a norm's parameters gamma and beta; transformers accepts both.
_OLD_KINDS = {"weight": "gamma", "bias": "beta"}

# Name parts that torch.compile, FSDP and activation checkpointing insert before any module.
_WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class StoredNames:
    """Names of a family's tensors in a checkpoint."""

    def __init__(self, family: Family, tied: bool = True) -> None:
        self._family = family
        self._tied = tied
        self._prefixes = (family.prefix, "", *(f"{alias}." for alias in family.aliases))
        self._unused = tuple(
            f"{prefix}{start}" for prefix in self._prefixes for start in (*family.unused, *_head_prefixes(family))
        )

    def find(self, name: str, stored: Collection[str]) -> str:
        """The checkpoint's name of ``name``: the first of the family's alternatives that is stored."""
        candidates = self._candidates(name)
        if found := self._found(candidates, stored):
            return found[0]
        if not name.startswith(_BACKBONE):
            return candidates[0]
        # Missing: spell its name as the others are spelled.
        return next((p for p in self._prefixes if p and any(n.startswith(p) for n in stored)), "") + candidates[0]

    def copies(self, name: str, stored: Collection[str]) -> list[str]:
        """The other stored names of ``name``; all must hold the same values as the tensor that ``find`` returns."""
        candidates = self._candidates(name)
        return self._found(candidates[:1] if name in _TIED else candidates, stored)[1:]

    def in_table_order(self, names: Mapping[str, Shape]) -> list[str]:
        """``names`` in the order of the family's table, which is the row order of joined tensors."""
        rank = {template: index for index, template in enumerate(self._family.weights)}
        return sorted(names, key=lambda name: rank.get(_template(name.rsplit(".", 1)[0]), 0))

    def is_read(self, stored: str) -> bool:
        """True if the tensor called ``stored`` must be known: buffers and heads that are not built need not be."""
        return not stored.startswith(self._unused) and not stored.endswith(_BUFFERS)

    def computed(self, stored: str) -> Computed | None:
        """The function that computes the required values of tensor ``stored``; None: it is read, or ignored."""
        return next((values for end, values in self._family.computed.items() if stored.endswith(end)), None)

    def unwrapped(self, stored: Collection[str]) -> dict[str, str]:
        """The library's name of each of ``stored``: without the parts that torch's wrappers insert, and without the
        common prefix of a model that was saved as a part of something larger.

        Raises WeightsError for two models, and for two tensors of one name.
        """
        names = {name: _WRAPPERS.sub("", name) for name in stored}
        prefix = self._outer_prefix(names.values())
        names = {name: inner.removeprefix(prefix) for name, inner in names.items()}
        first: dict[str, str] = {}
        for name, inner in names.items():
            if (other := first.setdefault(inner, name)) != name:
                raise WeightsError(
                    f"Tensors {other} and {name} are both {inner}: take the one out that is not the model's."
                )
        return names

    def _outer_prefix(self, names: Collection[str]) -> str:
        """The prefix of ``names`` before the family's own one, found by the word table, or an image's first matrix."""
        first = "embeddings.patch.weight" if "embeddings.patch" in self._family.weights else "embeddings.word.weight"
        tables = [f"{p}{candidate}" for p in self._prefixes for candidate in self._candidates(first)]
        if any(table in names for table in tables):
            return ""
        for table in tables:
            found = sorted(name.removesuffix(table) for name in names if name.endswith(f".{table}"))
            if len(found) > 1:
                raise WeightsError(
                    f"The checkpoint has two models, {found[0]}{table} and {found[1]}{table}: leave one of them in it."
                )
            if found:
                return found[0]
        return ""

    def _found(self, candidates: list[str], stored: Collection[str]) -> list[str]:
        names = (f"{prefix}{candidate}" for candidate in candidates for prefix in self._prefixes)
        return [name for name in dict.fromkeys(names) if name in stored]

    def _candidates(self, name: str) -> list[str]:
        """The checkpoint's possible names of ``name``, without prefixes."""
        table = self._family.weights
        module, kind = name.rsplit(".", 1)
        index = _LAYER.match(module)

        def spelled(alternatives: str | tuple[str, ...]) -> list[str]:
            names = (alternatives,) if isinstance(alternatives, str) else alternatives
            return [alternative.replace("{i}", index[1] if index else "") for alternative in names]

        key = self._key(name)
        if key in (module, _template(module)):
            return [f"{stored}.{k}" for stored in spelled(table[key]) for k in (kind, _OLD_KINDS[kind])]
        embeddings = {f"{stored}.weight" for stored in spelled(table.get("embeddings.word", ()))}
        return [stored for stored in spelled(table[key]) if self._tied or stored not in embeddings]

    def _key(self, name: str) -> str:
        """What ``name`` is called in the family's table: a layer's own names go before those of all layers."""
        module = name.rsplit(".", 1)[0]
        keys = (name, module, _template(name), _template(module))
        return next((key for key in keys if key in self._family.weights), keys[-1])


def layer_of(name: str) -> str:
    """The layer that ``name`` belongs to (``layers.3``), empty outside of the layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def _head_prefixes(family: Family) -> list[str]:
    """The prefixes of the family's head names: tensors of heads that are not built may be left over."""
    stored: dict[bool, list[str]] = {True: [], False: []}  # by True for the backbone's names, which heads may share
    for name, names in family.weights.items():
        end = "" if name.endswith((".weight", ".bias")) else "."
        spelled = [f"{each}{end}" for each in ((names,) if isinstance(names, str) else names)]
        stored[name.startswith(_BACKBONE)] += spelled
    return [name for name in stored[False] if not name.startswith(tuple(stored[True]))]


def _template(module: str) -> str:
    return _LAYER.sub(lambda found: found[0].replace(found[1], "{i}"), module, count=1)
