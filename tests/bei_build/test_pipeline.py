"""``build`` end to end: the artifact's content, the remains of a failure, and folders that are never overwritten."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from bei.artifact.certificate.thresholds import thresholds_of
from bei.artifact.manifest import TOKENIZER, Artifact, Manifest
from bei.artifact.signing_keys import fingerprint
from bei.artifact.store import is_artifact, load
from bei.core import Engine, EngineInfo, Limits, Outputs, PackedBatch
from bei.errors import ArtifactSchemaNewerError, CheckpointError, ConfigError, VerificationError, WeightsError
from bei_build import memory
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.reference import hf_model
from tests.support.builds import build_artifact, embed, open_engine, random_encodings, running, silent
from tests.support.checkpoints import (
    MAX_TOKENS,
    Normalize,
    add_modules,
    bpe_tokenizer,
    read_tensors,
    save_checkpoint,
    write_json,
    write_tensors,
)
from tests.support.keys import make_keys


@pytest.fixture
def checkpoint(bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT in a folder of its own, to be changed."""
    return Path(shutil.copytree(bert, tmp_path / "checkpoints" / "tiny"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "artifact"


class RotatedRows:
    """An engine that returns for each sequence of a batch its neighbour's vector."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_closed = False

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        return {name: np.roll(rows, 1, axis=0) for name, rows in self._engine.run(batch).items()}

    def warmup(self) -> None:
        self._engine.warmup()

    def close(self) -> None:
        self.is_closed = True
        self._engine.close()


def open_broken_engine(folder: Path, manifest: Manifest) -> Engine:
    return RotatedRows(open_engine(folder, manifest))


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# Content of the artifact.


def test_the_artifact_holds_the_documented_files_and_no_scratch(bert_artifact: Artifact) -> None:
    engine = ["engine/attention.json", "engine/model.bin", "engine/model.xml"]
    files = ["certificate.html", "certificate.json", *engine, "tokenizer.json"]
    assert files_under(bert_artifact.path) == sorted([*files, "engine", "manifest.json"])
    assert [info.path for info in bert_artifact.manifest.files] == files
    assert bert_artifact.path.stat().st_mode & 0o777 == 0o755


def test_build_returns_what_load_reads(checkpoint: Path, out: Path) -> None:
    built = build(BuildConfig(model=str(checkpoint), out=str(out), precision="fp32"), open_engine, silent())
    assert built == load(out)


def test_a_build_may_sign_what_it_has_built(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    keys, said = make_keys(tmp_path, passphrase="open"), io.StringIO()
    keys.private.chmod(0o644)
    asked: dict[str, Any] = {"precision": "fp32", "sign": str(keys.private), "sign_passphrase": "open", "verify": False}
    config = BuildConfig(model=str(checkpoint), out=str(out), **asked)
    built = build(config, open_engine, Progress(Console(file=said, width=500)))
    assert built == load(out)
    assert built.signed is not None
    assert built.signed.public_key == keys.raw
    assert f"signed by {fingerprint(keys.raw)}" in said.getvalue()
    assert "can be read by every user of this machine" in said.getvalue()


def test_a_build_over_a_signed_artifact_says_that_the_signature_goes_unless_it_signs(
    checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    key = str(make_keys(tmp_path).private)

    def built(sign: str | None) -> tuple[Artifact, str]:
        said = io.StringIO()
        config = BuildConfig(model=str(checkpoint), out=str(out), precision="fp32", verify=False, sign=sign)
        return build(config, open_engine, Progress(Console(file=said, width=500))), said.getvalue()

    words = f"note: {out} is signed, and what replaces it will not be: sign it again with 'bei sign'"
    assert words not in built(key)[1], "there was none"
    assert words not in built(key)[1], "it is kept"
    artifact, said = built(None)
    assert words in said
    assert artifact.signed is None
    assert words not in built(None)[1], "it is gone"


def test_a_key_that_cannot_sign_is_known_before_anything_is_computed(
    checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    (checkpoint / "config.json").unlink()  # the build does not come so far
    config = BuildConfig(model=str(checkpoint), out=str(out), sign=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"The signing key .*absent cannot be read"):
        build(config, open_engine, silent())


def test_the_manifest_says_what_the_checkpoint_is(bert_artifact: Artifact) -> None:
    manifest = bert_artifact.manifest
    assert (manifest.target, manifest.precision, manifest.tasks) == ("cpu", "fp32", ["embed"])
    assert (manifest.spec.family, manifest.spec.architecture, manifest.spec.num_layers) == ("bert", "BertModel", 2)
    assert manifest.limits == Limits(max_num_tokens=1024, max_batch_size=128, max_seq_len=MAX_TOKENS)
    assert manifest.embedding is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == ("mean", True)
    assert bert_artifact.certificate.passed
    assert bert_artifact.certificate.reference.startswith("transformers, FP32")
    assert bert_artifact.certificate.kind == "reference"


def test_sentence_transformers_settings_arrive(tmp_path: Path, out: Path) -> None:
    checkpoint = add_modules(save_checkpoint(tmp_path / "tiny", "roberta"), ("cls",), [Normalize()])
    write_json(checkpoint / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    prompts = {"query": "query: ", "passage": "passage: "}
    settings = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot", "matryoshka_dims": [8]}
    write_json(checkpoint / "config_sentence_transformers.json", settings)
    artifact = build_artifact(checkpoint, out)
    manifest = artifact.manifest
    assert (manifest.name, manifest.max_seq_len) == ("tiny", 24)
    assert (manifest.prompts, manifest.default_prompt_name) == (prompts, "query")
    assert manifest.embedding is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == ("cls", True)
    assert (manifest.embedding.similarity, manifest.embedding.matryoshka_dimensions) == ("dot", [8])
    assert manifest.embedding.int8_largest is not None
    assert 0.05 < manifest.embedding.int8_largest <= 1.0
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    assert tokenizer.encode("HELLO World").ids == bpe_tokenizer().encode("hello world").ids


def test_settings_of_the_build_win_over_the_files(checkpoint: Path, out: Path) -> None:
    add_modules(checkpoint, ("cls",), [Normalize()])
    settings: dict[str, Any] = {
        "pooling": "max",
        "normalize": False,
        "name": "served/as",
        "max_seq_len": 16,
        "max_batch_size": 4,
    }
    manifest = build_artifact(checkpoint, out, max_num_tokens=64, **settings).manifest
    assert manifest.embedding is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == ("max", False)
    assert (manifest.name, manifest.limits) == ("served/as", Limits(64, 4, 16))


def test_a_checkpoint_without_pooling_is_noted(checkpoint: Path, out: Path) -> None:
    text = io.StringIO()
    config = BuildConfig(model=str(checkpoint), out=str(out), precision="fp32")
    build(config, open_engine, Progress(Console(file=text)))
    assert "does not name its pooling; using mean" in text.getvalue()
    for step in ("Read checkpoint", "Compile (cpu, fp32)", "Verify", "Write artifact", f"Built {out}"):
        assert step in text.getvalue().replace("\n", "")


def test_the_default_out_is_named_after_model_target_and_precision(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    built = build(BuildConfig(model=str(checkpoint), precision="fp32"), open_engine, silent())
    assert built.path == tmp_path / "tiny-cpu-fp32"
    assert load(built.path).manifest == built.manifest


def test_a_checkpoint_without_tokenizer_json_builds(checkpoint: Path, bert_artifact: Artifact, out: Path) -> None:
    vocabulary = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab()
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=lambda word: vocabulary[word])))
    tokenizer = Tokenizer.from_file(str(build_artifact(checkpoint, out).path / TOKENIZER))
    expected = Tokenizer.from_file(str(bert_artifact.path / TOKENIZER))
    assert tokenizer.encode("Hello, the cat!").ids == expected.encode("Hello, the cat!").ids


# Verification decides.


def test_a_broken_engine_fails_the_build_and_leaves_nothing_behind(checkpoint: Path, out: Path) -> None:
    with pytest.raises(
        VerificationError, match=r"embedding: mean cosine .* below 0\.99999, p1 .*; worst text: .*--min-cos"
    ):
        build_artifact(checkpoint, out, open_broken_engine)
    assert files_under(out.parent) == []


def test_a_broken_engine_is_kept_and_marked_when_asked(checkpoint: Path, out: Path) -> None:
    artifact = build_artifact(checkpoint, out, open_broken_engine, allow_below_threshold=True)
    assert artifact.certificate.passed is False
    assert artifact.certificate.outputs[0].cosine_mean < 0.999
    assert artifact.certificate.thresholds == thresholds_of(0.99999)


def test_min_cosine_moves_the_threshold(checkpoint: Path, out: Path) -> None:
    artifact = build_artifact(checkpoint, out, open_broken_engine, min_cosine=-1.0)
    assert artifact.certificate.passed is True
    with pytest.raises(
        VerificationError, match=r"embedding: mean cosine 0\.\d+ below 1, .*To do: .*choose a higher precision"
    ):
        build_artifact(checkpoint, out.with_name("int8"), precision="int8", min_cosine=1.0)


def test_the_pytorch_module_can_be_the_reference(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = build_artifact(checkpoint, out, reference="module")
    assert artifact.certificate.reference == "bei's PyTorch module, FP32, one text at a time"
    assert (artifact.certificate.kind, artifact.certificate.passed) == ("self-consistency", True)
    monkeypatch.setattr(hf_model, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--reference module: torch is not installed\. Use --reference engine"):
        build_artifact(checkpoint, out, reference="module")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_fp32_engine_can_be_the_reference(precision: str, checkpoint: Path, out: Path) -> None:
    artifact = build_artifact(checkpoint, out, precision=precision, reference="engine")
    assert artifact.certificate.reference == "openvino engine, FP32, one text at a time"
    assert artifact.certificate.kind == "self-consistency"
    assert artifact.certificate.passed
    assert files_under(out.parent) == ["artifact", *(f"artifact/{file}" for file in files_under(out))]
    assert "engine/model.bin" in files_under(out)


def test_the_engine_reference_catches_a_broken_engine_too(checkpoint: Path, out: Path) -> None:
    with pytest.raises(VerificationError, match="openvino engine, FP32, one text at a time"):
        build_artifact(checkpoint, out, open_broken_engine, reference="engine")
    assert files_under(out.parent) == []


def test_without_torch_the_engine_is_the_reference(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_model, "is_available", lambda: False)
    assert build_artifact(checkpoint, out).certificate.reference.startswith("openvino engine")
    with pytest.raises(ConfigError, match=r"--reference hf needs torch.*use --reference engine"):
        build_artifact(checkpoint, out, reference="hf")


def test_damaged_weights_are_not_certified(checkpoint: Path, out: Path) -> None:
    tensors = read_tensors(checkpoint)
    tensors["embeddings.LayerNorm.bias"][0] = float("nan")
    with pytest.raises(VerificationError, match="gives NaN or Inf"):
        build_artifact(write_tensors(checkpoint, tensors), out, allow_below_threshold=True)
    assert files_under(out.parent) == []


@pytest.mark.parametrize("is_broken", [False, True])
def test_engines_are_closed(is_broken: bool, checkpoint: Path, out: Path) -> None:
    opened: list[RotatedRows] = []

    def open_and_remember(folder: Path, manifest: Manifest) -> Engine:
        opened.append(RotatedRows(open_engine(folder, manifest)))
        return opened[-1]

    try:
        build_artifact(checkpoint, out, open_and_remember, reference="engine", min_cosine=None if is_broken else -1.0)
    except VerificationError:
        assert is_broken
    assert [engine.is_closed for engine in opened] == [True, True]


def test_without_verification_nothing_is_compared_and_the_artifact_says_so(checkpoint: Path, out: Path) -> None:
    opened: list[RotatedRows] = []

    def open_and_remember(folder: Path, manifest: Manifest) -> Engine:
        opened.append(RotatedRows(open_engine(folder, manifest)))
        return opened[-1]

    text = io.StringIO()
    config = BuildConfig(model=str(checkpoint), out=str(out), precision="fp32", verify=False)
    artifact = build(config, open_and_remember, Progress(Console(file=text)))
    assert artifact == load(out)
    assert (artifact.certificate.kind, artifact.manifest.verification) == ("none", "none")
    assert artifact.certificate.passed is False
    assert [engine.is_closed for engine in opened] == [True]
    assert "not verified, as --no-verify asked" in text.getvalue()
    verified = build_artifact(checkpoint, out)
    assert (verified.manifest.verification, verified.certificate.canary_row) == (
        "reference",
        artifact.certificate.canary_row,
    )


def test_engine_and_reference_are_never_open_together(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RotatedRows] = []

    def open_alone(folder: Path, manifest: Manifest) -> Engine:
        assert all(engine.is_closed for engine in opened)
        opened.append(RotatedRows(open_engine(folder, manifest)))
        return opened[-1]

    load_model = hf_model.load_model

    def load_alone(*arguments: Any) -> Any:
        assert [engine.is_closed for engine in opened] == [True]
        return load_model(*arguments)

    monkeypatch.setattr(hf_model, "load_model", load_alone)
    build_artifact(checkpoint, out, open_alone, min_cosine=-1.0)
    opened.clear()
    build_artifact(checkpoint, out, open_alone, min_cosine=-1.0, reference="engine")
    assert len(opened) == 2


def test_a_budget_of_no_time_verifies_the_first_texts(checkpoint: Path, out: Path) -> None:
    certificate = build_artifact(checkpoint, out, verify_budget=1e-6, max_batch_size=4, all_texts=True).certificate
    assert (certificate.num_texts, certificate.passed) == (10, True)
    assert certificate.verdict == "passed on 10 of 101 texts"


def test_a_reference_that_does_not_fit_is_refused_before_it_is_made(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    message = r"The FP32 engine to verify with takes .* GB of memory, and 0\.0 GB are available.*--no-verify"
    with pytest.raises(VerificationError, match=message):
        build_artifact(checkpoint, out, reference="engine")
    assert files_under(out.parent) == []
    assert build_artifact(checkpoint, out).certificate.passed  # FP32 weights are the checkpoint's own pages


# Existing output folders.


def test_an_artifact_is_replaced_at_the_end_and_only_by_a_good_one(checkpoint: Path, out: Path) -> None:
    old = build_artifact(checkpoint, out, name="old")

    def open_and_look(folder: Path, manifest: Manifest) -> Engine:
        assert load(out).manifest == old.manifest
        assert not is_artifact(folder.parent)  # a build that is killed now leaves nothing that could be served
        return open_engine(folder, manifest)

    with pytest.raises(VerificationError):
        build_artifact(checkpoint, out, open_broken_engine, name="broken")
    assert load(out).manifest == old.manifest
    assert build_artifact(checkpoint, out, open_and_look, name="new").manifest.name == "new"
    assert files_under(out.parent)[0] == "artifact"


def test_an_interrupted_build_leaves_the_old_artifact_and_nothing_else(checkpoint: Path, out: Path) -> None:
    def interrupt(folder: Path, manifest: Manifest) -> Engine:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_artifact(checkpoint, out, interrupt)
    assert files_under(out.parent) == []
    old = build_artifact(checkpoint, out)
    with pytest.raises(KeyboardInterrupt):
        build_artifact(checkpoint, out, interrupt)
    assert load(out).manifest == old.manifest
    assert [path.name for path in out.parent.iterdir()] == ["artifact"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("thesis.txt", "years of work"),
        ("manifest.json", '{"name": "a browser extension", "manifest_version": 3}'),
        ("manifest.json", "not JSON"),
        (".hidden", ""),
    ],
)
def test_a_folder_that_is_not_an_artifact_is_never_overwritten(
    file: str, content: str, checkpoint: Path, out: Path
) -> None:
    out.mkdir(parents=True)
    (out / file).write_text(content)
    with pytest.raises(ConfigError, match=r"exists and is not an artifact.*Choose another --out"):
        build_artifact(checkpoint, out)
    assert (out / file).read_text() == content
    assert files_under(out.parent) == ["artifact", f"artifact/{file}"]


def test_a_file_is_never_overwritten(checkpoint: Path, out: Path) -> None:
    out.parent.mkdir()
    out.write_text("years of work")
    with pytest.raises(ConfigError, match="is not an artifact"):
        build_artifact(checkpoint, out)
    assert out.read_text() == "years of work"


def test_an_empty_folder_is_used(checkpoint: Path, out: Path) -> None:
    out.mkdir(parents=True)
    assert build_artifact(checkpoint, out).path == out


def test_a_damaged_artifact_and_one_of_a_newer_bei_are_replaced(checkpoint: Path, out: Path) -> None:
    artifact = build_artifact(checkpoint, out)
    manifest = out / "manifest.json"
    write_json(manifest, {**json.loads(manifest.read_text()), "schema_version": 999})
    with pytest.raises(ArtifactSchemaNewerError):
        load(out)
    (out / "tokenizer.json").unlink()
    assert build_artifact(checkpoint, out).manifest == artifact.manifest


def test_a_link_to_an_artifact_stays_a_link(checkpoint: Path, out: Path) -> None:
    build_artifact(checkpoint, out, name="old")
    link = out.with_name("current")
    link.symlink_to(out)
    build_artifact(checkpoint, link, name="new")
    assert link.is_symlink()
    assert load(out).manifest.name == "new"


def test_an_artifact_may_be_built_inside_the_checkpoint_and_built_again(checkpoint: Path) -> None:
    first = build_artifact(checkpoint, checkpoint / "artifact")
    assert build_artifact(checkpoint, checkpoint / "artifact").manifest.digest == first.manifest.digest


# Refusals.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_num_tokens": 16}, ConfigError, r"cannot hold one sequence .*raise --max-num-tokens or lower --max-seq"),
        ({"max_seq_len": MAX_TOKENS + 1}, CheckpointError, "49 is beyond the 48 positions"),
        ({"precision": "fp16"}, ConfigError, "Target cpu has no precision 'fp16'. Precisions: auto, fp32, bf16, int8"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str, checkpoint: Path, out: Path
) -> None:
    with pytest.raises(error, match=message):
        build_artifact(checkpoint, out, **settings)
    assert not out.parent.exists() or files_under(out.parent) == []


def test_damaged_files_are_refused_and_leave_nothing_behind(checkpoint: Path, out: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="is not a readable safetensors file"):
        build_artifact(checkpoint, out)
    assert files_under(out.parent) == []


def test_every_stored_form_of_the_weights_gives_the_same_engine(tmp_path: Path) -> None:
    """Single, sharded, pickled, or with a task's head: the vectors are those of the same model."""
    import torch

    whole = save_checkpoint(tmp_path / "whole", dtype=torch.bfloat16)
    sharded = save_checkpoint(tmp_path / "sharded", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    pickled = Path(shutil.copytree(whole, tmp_path / "pickled"))
    torch.save(read_tensors(pickled), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    hashes = {
        file.sha256
        for folder in (whole, sharded, pickled)
        for file in build_artifact(folder, tmp_path / f"{folder.name}-artifact").manifest.files
        if file.path == "engine/model.bin"
    }
    assert len(hashes) == 1


def test_a_masked_language_model_builds_as_an_embedder_where_asked(tmp_path: Path, out: Path) -> None:
    artifact = build_artifact(save_checkpoint(tmp_path / "tiny", task="ForMaskedLM"), out, task="embed")
    assert artifact.manifest.spec.architecture == "BertForMaskedLM"
    with running(artifact) as engine:
        rows = embed(engine, random_encodings([3, 5], artifact.manifest.spec.vocab_size))
    assert np.isfinite(rows).all()
