"""Models that no class of transformers describes whole: a tiny checkpoint of each, for tests of targets.

``tests.support.zoo`` has transformers' classes. These have code of their own, adapters, lists of documents, or modules
of sentence-transformers that are layers of the graph. Tests of families hold each to its authors' code on target cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bei.core import Encoding
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.spec.model_spec import ModelSpec
from tests.bei_build.families import jina, lfm2, nomic, nv_embed, test_jina_v3, test_jina_v5
from tests.bei_build.weights.test_peft_adapters import save_lora
from tests.hub_matrix import stored, stored_modules
from tests.support.builds import random_encodings
from tests.support.checkpoints import (
    HIDDEN,
    add_modules,
    change_config,
    change_json,
    read_tensors,
    save_static,
    write_tensors,
)
from tests.support.inference_free import save_inference_free
from tests.support.late_interaction import WIDTH, Settings, save_colbert
from tests.support.listwise import save_listwise
from tests.support.reading import saved
from tests.support.stable_static import save_stable_static
from tests.support.two_towers import save_siglip

LONGEST = 48
LENGTHS = (1, 45, 2, 17, 16, 5, 33)


@dataclass(frozen=True)
class Other:
    """``save`` writes the checkpoint into a folder that is not there, and returns where it is. ``choice``: arguments of
    ``HeadChoice``. ``num_loras``: so many adapters of the user's. ``has_expansion``: texts end in tokens that are no
    keys."""

    save: Callable[[Path], Path]
    choice: Mapping[str, Any] = field(default_factory=dict)
    num_loras: int = 0
    has_expansion: bool = False

    def lora_folders(self, checkpoint: Path) -> dict[str, Path]:
        """Random adapters of ``checkpoint``, saved beside it."""
        names = [f"lora{seed}" for seed in range(self.num_loras)]
        return {
            name: save_lora(checkpoint.with_name(name), checkpoint, "Qwen3Model", seed)
            for seed, name in enumerate(names)
        }

    def read(self, folder: Path) -> Checkpoint:
        """Save it into ``folder`` and read it, for texts of up to ``LONGEST`` tokens."""
        checkpoint = self.save(folder / "checkpoint")
        found = read_checkpoint(locate(str(checkpoint)), HeadChoice(**self.choice), loras=self.lora_folders(checkpoint))
        spec = replace(found.spec, partial_keys=True) if self.has_expansion else found.spec
        return replace(found, spec=spec, max_seq_len=min(found.max_seq_len, LONGEST))


def encodings_of(spec: ModelSpec) -> list[Encoding]:
    """Random texts of ``LENGTHS``: with every adapter, tokens that are no keys, and prompts, where a model has any."""
    most = spec.embeddings.longest or LONGEST
    lengths = [min(length, most) for length in LENGTHS]
    encodings = random_encodings(lengths, spec.embeddings.vocab_size, pairs=spec.embeddings.type_vocab_size > 1)
    if spec.adapters:
        count = len(spec.adapters.names) + 1
        encodings = [one._replace(adapter=index % count) for index, one in enumerate(encodings)]
    if spec.partial_keys:
        encodings = [one._replace(num_keys=max(1, one.num_tokens // 2)) for one in encodings]
    if not spec.pools_prompt:
        encodings = [one._replace(num_unpooled=min(2, one.num_tokens - 1)) for one in encodings]
    return [spec.filled(one) for one in encodings]


def _jina_v3(folder: Path) -> Path:
    native = saved(folder.with_name("native"), "JinaEmbeddingsV3Model")
    return test_jina_v3.with_adapters(test_jina_v3.original(native), None)


def _pplx(folder: Path) -> Path:
    own = {"model_type": "bidirectional_pplx_qwen3", "architectures": ["PPLXQwen3Model"]}
    change_config(saved(folder, "Qwen3Model"), **own, auto_map={"AutoModel": "modeling.PPLXQwen3Model"})
    add_modules(folder, ("mean",), [])
    stored_modules.flexible_quantizer(folder)
    return folder


def _embedding_gemma2(folder: Path) -> Path:
    saved(folder, "EmbeddingGemma2TextModel")
    stored.beside_towers(folder)
    return add_modules(folder, ("mean",), hidden=24)


def _pylate(folder: Path) -> Path:
    save_colbert(folder, Settings())
    dense = folder / "1_Dense"
    change_json(dense / "config.json", use_residual=True)
    matrix = torch.randn(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(16)) / 6
    write_tensors(dense, {**read_tensors(dense), "residual.weight": matrix})
    return folder


def _with_mean(save: Callable[..., Path], hidden: int, **settings: Any) -> Callable[[Path], Path]:
    return lambda folder: add_modules(save(folder, **settings), ("mean",), hidden=hidden)


OTHERS: Mapping[str, Other] = {
    "LFM2.5-Embedding": Other(lfm2.save),
    "LFM2.5-ColBERT": Other(lfm2.save, {"token_states": True}, has_expansion=True),
    "jina-embeddings-v5-small": Other(partial(test_jina_v5.with_adapters, backbone="Qwen3Model")),
    "jina-embeddings-v5-nano": Other(partial(test_jina_v5.with_adapters, backbone="EuroBertModel", is_decoder=False)),
    "jina-embeddings-v3": Other(_jina_v3),
    "LoRA adapters": Other(partial(saved, name="Qwen3Model"), {"pooling": "last"}, num_loras=2),
    "jina-reranker-v3": Other(save_listwise),
    "jina-reranker-v3.5": Other(partial(save_listwise, window=8)),
    "pplx-embed-v1": Other(_pplx),
    "EmbeddingGemma 2 beside towers": Other(_embedding_gemma2),
    "stable-static-embedding": Other(save_stable_static),
    "model2vec": Other(save_static),
    "nomic-embed-v2-moe": Other(_with_mean(nomic.save, nomic.HIDDEN)),
    "jina-embeddings-v2": Other(_with_mean(jina.save, jina.HIDDEN)),
    "jina-embeddings-v2-code": Other(_with_mean(jina.save, jina.HIDDEN, code=jina.CODE)),
    "NV-Embed": Other(lambda folder: nv_embed.around(saved(folder, "MistralModel"))),
    "opensearch-neural-sparse, documents": Other(save_inference_free),
    "PyLate with a residual": Other(_pylate),
    "SigLIP, texts": Other(save_siglip),
}
# FP8 leaves no room for adapters, and says so.
ADAPTED = ("jina-embeddings-v5-small", "jina-embeddings-v5-nano", "jina-embeddings-v3", "LoRA adapters")
