"""A checkpoint after reading, and its weights under our names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Extraction, Labelling, Listwise, OptionMarkers
from bei.artifact.manifest import Tokenization
from bei.artifact.sides import Role
from bei.core import Float32Array
from bei_build.checkpoint.colbert import Side
from bei_build.checkpoint.heads import Labels
from bei_build.checkpoint.locate import Location
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles
from bei_build.families.base import Family
from bei_build.spec.model_spec import ModelSpec
from bei_build.tokenizer.library_tokenizer import (
    TokenizerSettings,
)
from bei_build.weights.lora import Adapter, AdapterSet
from bei_build.weights.model_weights import ModelWeights, SideModule
from bei_build.weights.packed_format import StoredPacked
from bei_build.weights.quantized_format import StoredFP8


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights.

    ``rowless``: tokens that the tokenizer's class adds and for which the model has no row; they are left out. ``fp8``:
    its FP8 settings, where its matrices are stored in FP8; ``packed``: their form, where it is another one of few bits.
    ``token_weights``: float32 [vocabulary], the table of the side whose sparse vectors are looked up, if there is one.
    """

    location: Location
    files: SentenceTransformersFiles
    family: Family
    spec: ModelSpec
    tokenizer: Tokenizer
    tokenizer_settings: TokenizerSettings
    tokenization: Tokenization
    rowless: tuple[str, ...]
    max_seq_len: int
    labels: Labels | None
    modules: Mapping[str, SideModule]
    config: Any
    roles: Mapping[Side, Role]
    adapter: Adapter | None
    adapters: AdapterSet | None = None
    fp8: StoredFP8 | None = None
    packed: StoredPacked | None = None
    token_weights: Float32Array | None = None
    extraction: Extraction | None = None
    listwise: Listwise | None = None
    labelling: Labelling | None = None
    option_markers: OptionMarkers | None = None

    def merged(self, number: int) -> Checkpoint:
        """The same model with adapter ``number`` of ``adapters`` in its weights, and none beside them."""
        assert self.adapters is not None
        spec, adapter = replace(self.spec, adapters=None), self.adapters.merged(number)
        return replace(self, spec=spec, adapter=adapter, adapters=None)

    @property
    def folder(self) -> Path:
        """The folder with config, tokenizer and weights of the transformer."""
        return self.files.transformer_folder

    def weights(self) -> ModelWeights:
        """Open the weights. Raises WeightsError naming the tensors that are missing, misshapen or left over."""
        tied = bool(getattr(self.config, "tie_word_embeddings", True))
        return ModelWeights(
            self.spec,
            self.family,
            self.folder,
            self.modules,
            tied=tied,
            adapter=self.adapter,
            adapters=self.adapters,
            fp8=self.fp8,
            packed=self.packed,
        )
