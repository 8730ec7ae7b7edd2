"""A GGUF file alone: its metadata give the checkpoint's settings and its tokenizer, or are refused by name."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from bei.errors import (
    BeiError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    HubUnreachableError,
    MissingDependencyError,
    TokenizerError,
    WeightsError,
)
from bei_build.checkpoint.locate import locate
from tests.support.builds import build_artifact
from tests.support.checkpoints import (
    Dense,
    Normalize,
    add_modules,
    bpe_tokenizer,
    change_config,
    read_tensors,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_tensors,
)
from tests.support.gguf_files import save_gguf, vocabulary_metadata
from tests.support.reading import read, refused
from tests.support.zoo import CASES, Case, save_case

_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
_TEXTS = ("the cats sat, on a mat!", "Hello  WORLD 123 in 世界", "  don't\n\nsee café ", "")
_BY_NAME = {case.name: case for case in CASES}
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_tokenizer() -> Tokenizer:
    """As Qwen3-Embedding's: a text ends in <|endoftext|>."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end[0]}", pair=f"$A {end[0]} $B {end[0]}", special_tokens=[end]
    )
    return tokenizer


def xlm_tokenizer() -> Tokenizer:
    tokenizer = unigram_tokenizer()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    return tokenizer


# The architecture; a case of the zoo and settings for it; the tokenizer, its kind, and how it splits; other metadata.
_FILES: Mapping[
    str, tuple[str, str, Mapping[str, Any], Callable[[], Tokenizer], tuple[str, str], Mapping[str, Any]]
] = {
    "BERT": ("bert", "BertModel", {}, wordpiece_tokenizer, ("bert", "jina-v2-en"), {}),
    "DistilBERT": ("bert", "DistilBertModel", {}, wordpiece_tokenizer, ("bert", "default"), {}),
    "RoBERTa": ("bert", "RobertaModel", {}, bpe_tokenizer, ("gpt2", "roberta-bpe"), {}),
    "XLM-RoBERTa": ("bert", "XLMRobertaModel", {}, xlm_tokenizer, ("t5", "default"), {}),
    "NomicBERT": ("nomic-bert", "NomicBertModel", {}, wordpiece_tokenizer, ("bert", "default"), {}),
    "Qwen2": (
        "qwen2",
        "Qwen2Model",
        {"head_dim": None, "use_sliding_window": False},
        qwen_tokenizer,
        ("gpt2", "qwen2"),
        {},
    ),
    "Qwen3": ("qwen3", "Qwen3Model", {}, qwen_tokenizer, ("gpt2", "qwen2"), {}),
    "Qwen3 with YaRN": (
        "qwen3",
        "Qwen3Model",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 12,
            }
        },
        qwen_tokenizer,
        ("gpt2", "qwen2"),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": np.float32(4), "rope.scaling.original_context_length": 12},
    ),
    "Llama": ("llama", "LlamaModel", {}, qwen_tokenizer, ("gpt2", "qwen2"), {}),
}


def _files(folder: Path, name: str, pooling: int = 1, kind: str = "F32") -> tuple[Path, Path]:
    """A checkpoint with a pooling and a normalization behind it, and a GGUF file of it that lies alone."""
    arch, case_name, settings, tokenizer, (model, pre), more = _FILES[name]
    case = _BY_NAME[case_name]
    made = {key: value for key, value in {**case.settings, **settings}.items() if value is not None}
    source = save_case(folder / "source", Case(case.family, case.architecture, made, tokenizer))
    add_modules(source, ({1: "mean", 2: "cls", 3: "last"}[pooling],), (Normalize(),))
    metadata = {**vocabulary_metadata(tokenizer(), model, pre), f"{arch}.pooling_type": pooling}
    if model == "gpt2" and pre == "qwen2":
        metadata["tokenizer.ggml.add_eos_token"] = True
        metadata["tokenizer.ggml.eos_token_id"] = tokenizer().token_to_id("<|endoftext|>")
    metadata |= {f"{arch}.{key}": value for key, value in more.items()}
    return source, save_gguf(source, folder / "alone" / "tiny-model.gguf", arch, metadata, kind=kind)


@pytest.mark.parametrize("name", _FILES)
def test_a_file_alone_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, name: str) -> None:
    source, file = _files(tmp_path, name)
    one, other = read(source), read(file)
    assert one.spec == other.spec
    assert (one.max_seq_len, one.files.normalize) == (other.max_seq_len, other.files.normalize)
    for text, second in [*((text, None) for text in _TEXTS), _TEXTS[:2]]:
        wanted, found = (encode(text, second) for encode in (one.tokenizer.encode, other.tokenizer.encode))
        assert (found.ids, found.type_ids) == (wanted.ids, wanted.type_ids), text
    with one.weights() as stored, other.weights() as weights:
        for weight, _ in one.spec.weights():
            if weight != "embeddings.position.weight":  # RoBERTa's first row, of padding
                np.testing.assert_array_equal(weights.read(weight), stored.read(weight), weight)


def test_a_file_builds_and_says_what_it_was_compared_with(tmp_path: Path) -> None:
    _, file = _files(tmp_path, "Qwen3", pooling=3, kind="Q8_0")
    artifact = build_artifact(file, tmp_path / "artifact")
    certificate = json.loads((artifact.path / "certificate.json").read_text())
    assert certificate["reference"].endswith("its Q8_0 weights dequantized")


def test_embedding_gemma_s_dense_modules_come_out_of_its_file(tmp_path: Path) -> None:
    settings = {"use_bidirectional_attention": True, "num_hidden_layers": 6, "sliding_window_pattern": 6}
    case = _BY_NAME["Gemma3TextModel"]
    made = {**case.settings, **settings, "rope_parameters": _GEMMA_ROPE, "query_pre_attn_scalar": 12}
    source = save_case(tmp_path / "source", Case(case.family, case.architecture, made, case.tokenizer))
    change_config(source, sliding_window=8)  # the class has saved its half
    add_modules(source, ("mean",), (Dense(40, "Identity", False), Dense(24, "Identity", False), Normalize()))
    dense = [load_file(source / f"{at}_Dense" / "model.safetensors")["linear.weight"] for at in (2, 3)]
    metadata = {"gemma-embedding.pooling_type": 1, "gemma-embedding.attention.sliding_window": 8}
    for at, matrix in enumerate(dense, 2):
        rows, columns = matrix.shape
        metadata |= {f"gemma-embedding.dense_{at}_feat_in": columns, f"gemma-embedding.dense_{at}_feat_out": rows}
    extra = {f"dense_{at}.weight": matrix for at, matrix in enumerate(dense, 2)}
    file = save_gguf(source, tmp_path / "alone" / "m.gguf", "gemma-embedding", metadata, extra=extra)
    shutil.copy(source / "tokenizer.json", file.parent)
    shutil.copy(source / "tokenizer_config.json", file.parent)
    one, other = read(source), read(file)
    assert one.spec == other.spec
    with one.weights() as stored, other.weights() as weights:
        for weight, _ in one.spec.weights():
            np.testing.assert_allclose(weights.read(weight), stored.read(weight), rtol=0, atol=2e-7, err_msg=weight)


def _with(folder: Path, name: str, metadata: Mapping[str, Any], *without: str) -> Path:
    """A GGUF file alone whose metadata are changed."""
    arch, case_name, settings, tokenizer, (model, pre), _ = _FILES[name]
    case = _BY_NAME[case_name]
    made = {key: value for key, value in {**case.settings, **settings}.items() if value is not None}
    source = save_case(folder / "source", Case(case.family, case.architecture, made, tokenizer))
    given = {**vocabulary_metadata(tokenizer(), model, pre), f"{arch}.pooling_type": 1, **metadata}
    kept = {key: value for key, value in given.items() if key not in without}
    return save_gguf(source, folder / "alone" / "m.gguf", arch, kept)


@pytest.mark.parametrize(
    ("name", "metadata", "error", "message"),
    [
        ("Qwen3", {"qwen3.expert_count": 8}, CheckpointError, "has qwen3.expert_count, which bei does not read"),
        ("Qwen3", {"qwen3.rope.scaling.type": "longrope"}, CheckpointError, "has qwen3.rope.scaling.type = 'longrope'"),
        ("Qwen3", {"qwen3.pooling_type": 4}, CheckpointError, "holds a reranker made of a language model"),
        ("Qwen3", {"qwen3.pooling_type": 9}, CheckpointError, "has pooling_type 9"),
        ("Qwen3", {"qwen3.block_count": "three"}, CheckpointError, "block_count = 'three': it must be of type int"),
        ("Qwen3", {"qwen3.attention.head_count": 0}, WeightsError, "qwen3.attention.head_count is 0"),
        ("BERT", {"bert.pooling_type": 4}, CheckpointError, "holds a classifier without BERT's pooler"),
        ("BERT", {"bert.attention.causal": True}, CheckpointError, "attention.causal = True, and bei reads False"),
        ("BERT", {"tokenizer.ggml.model": "plamo2"}, CheckpointError, "a BERT with tokenizer.ggml.model = 'plamo2'"),
        ("Qwen3", {"tokenizer.ggml.model": "llama"}, TokenizerError, "has tokenizer.ggml.model = 'llama', of which"),
        ("Qwen3", {"tokenizer.ggml.pre": "tekken"}, TokenizerError, "splits texts by tokenizer.ggml.pre = 'tekken'"),
        ("Qwen3", {"tokenizer.ggml.token_type": [1]}, TokenizerError, "tokens and types of 1"),
        ("Qwen3", {"tokenizer.ggml.merges": ["a b c"]}, TokenizerError, "has no list of merges, each of two tokens"),
        ("Qwen3", {"tokenizer.ggml.merges": ["quer ty"]}, TokenizerError, "vocabulary is damaged"),
        ("XLM-RoBERTa", {"tokenizer.ggml.bos_token_id": 99999}, TokenizerError, "has bos_token_id 99999 of"),
        ("XLM-RoBERTa", {"tokenizer.ggml.add_space_prefix": False}, TokenizerError, "keeps spaces of texts"),
    ],
)  # fmt: skip
def test_what_metadata_do_not_say_is_refused_by_name(
    tmp_path: Path, name: str, metadata: Mapping[str, Any], error: type[BeiError], message: str
) -> None:
    refused(_with(tmp_path, name, metadata), error, message)


def test_lower_case_words_with_accents_are_refused(tmp_path: Path) -> None:
    metadata = vocabulary_metadata(wordpiece_tokenizer(), "bert")
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    tokens[-1] = "▁café"
    file = _with(tmp_path, "BERT", {"tokenizer.ggml.tokens": tokens})
    refused(file, TokenizerError, "does not say whether accents are kept. Put the model's own tokenizer.json beside")


def test_an_architecture_that_is_not_read_is_named(tmp_path: Path) -> None:
    source, _ = _files(tmp_path, "Qwen3")
    file = tmp_path / "other" / "m.gguf"
    file.parent.mkdir()
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(file, WeightsError, "general.architecture is 'mamba'; bei reads bert, jina-bert-v2, nomic-bert")
    (file.parent / "config.json").write_bytes((source / "config.json").read_bytes())
    refused(file.parent, WeightsError, "general.architecture is 'mamba'")


def test_settings_of_another_model_beside_a_file_are_refused(tmp_path: Path) -> None:
    source, file = _files(tmp_path, "BERT")
    other = save_case(tmp_path / "other", _BY_NAME["Qwen3Model"])
    shutil.copy(other / "config.json", file.parent)
    refused(file, WeightsError, "The GGUF file holds a bert, and config.json describes a qwen3")
    shutil.copy(source / "config.json", file.parent)
    change_config(file.parent, num_hidden_layers=2)
    refused(file, WeightsError, "is not part of this architecture")


def test_a_config_with_a_model_type_alone_is_none(tmp_path: Path) -> None:
    source, file = _files(tmp_path, "BERT")
    (file.parent / "config.json").write_text('{"model_type": "bert"}')
    assert read(file).spec == read(source).spec


def test_a_classifier_of_bert_lacks_its_pooler(tmp_path: Path) -> None:
    source = save_case(tmp_path / "source", _BY_NAME["BertForSequenceClassification"])
    tensors = {"classifier.out_proj.weight": "cls.output.weight", "classifier.out_proj.bias": "cls.output.bias"}
    stored = read_tensors(source)
    extra = {name: stored[f"classifier.{name.rsplit('.', 1)[1]}"].numpy() for name in tensors.values()}
    write_tensors(source, {name: tensor for name, tensor in stored.items() if not name.startswith("classifier.")})
    file = save_gguf(source, tmp_path / "m" / "m.gguf", "bert", extra=extra)
    shutil.copy(source / "config.json", file.parent)
    shutil.copy(source / "tokenizer.json", file.parent)
    refused(file, WeightsError, "llama.cpp's converter leaves BERT's pooler out")


def test_the_temporary_folder_goes_with_the_checkpoint(tmp_path: Path) -> None:
    _, file = _files(tmp_path, "BERT")
    checkpoint = read(file)
    folder = checkpoint.folder
    assert (folder / "model.gguf").resolve() == file
    del checkpoint
    gc.collect()
    assert not folder.exists()


def test_files_of_one_folder_are_told_apart(tmp_path: Path) -> None:
    _, file = _files(tmp_path, "BERT")
    folder = file.parent
    assert locate(str(folder)).gguf == file
    shutil.copy(file, folder / "tiny-model-Q8_0.gguf")
    with pytest.raises(
        CheckpointNotFoundError, match=r"has 2 GGUF files.*tiny-model-Q8_0\.gguf, tiny-model\.gguf.*pass the path"
    ):
        locate(str(folder))
    named = locate(str(folder / "tiny-model-Q8_0.gguf"))
    assert (named.name, named.kind, named.gguf) == ("tiny-model-Q8_0", "path", folder / "tiny-model-Q8_0.gguf")
    with pytest.raises(ConfigError, match="is a file: leave it out"):
        locate(str(file), "main")
    (folder / "model.safetensors").touch()
    assert locate(str(folder)).gguf is None
    assert locate(str(file)).gguf == file


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A repository of GGUF files; the patterns that were downloaded."""
    files = ["README.md", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "other/tiny-F16.gguf"]
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend(pattern for pattern in allow_patterns if ".gguf" in pattern)
        for name in files:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: files)
    return asked


def test_one_file_of_a_repository_is_downloaded(hub: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointNotFoundError, match=r"2 GGUF files, and no other weights: name one as a/b:FILE.*Q8_0"
    ):
        locate("a/b")
    with pytest.raises(CheckpointNotFoundError, match="no GGUF file with 'Q6' in its name"):
        locate("a/b:Q6")
    assert hub == []
    for asked in ("a/b:q8_0", "a/b:tiny-Q8_0.gguf"):
        location = locate(asked)
        assert (location.model, location.kind, location.gguf) == ("a/b", "hub", tmp_path / "tiny-Q8_0.gguf")
    assert hub == ["tiny-Q8_0.gguf"] * 2


def test_a_file_that_is_here_is_found_without_the_hub(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> list[str]:
        raise ConnectionError("no network")

    here = locate("a/b:Q8_0")
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", unreachable)
    assert locate("a/b:Q8_0") == here
    here.folder.joinpath("tiny-Q8_0.gguf").unlink()
    with pytest.raises(HubUnreachableError, match="no network"):
        locate("a/b:Q8_0")


def test_a_package_may_carry_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = _files(tmp_path, "BERT")
    root = tmp_path / "site" / "tiny_gguf_package"
    root.mkdir(parents=True)
    (root / "__init__.py").touch()
    shutil.copy(file, root)
    monkeypatch.syspath_prepend(root.parent)
    location = locate("tiny-gguf-package")
    assert (location.kind, location.gguf) == ("package", root / file.name)


def test_without_the_library_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = _files(tmp_path, "BERT")
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"Reading a GGUF file.*bei\[gguf\]"):
        read(file)
