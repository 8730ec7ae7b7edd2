"""``build``: checkpoint to artifact, the recipe in numbered steps."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from bei import __version__
from bei.artifact import (
    ENGINE_DIR,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    Certificate,
    Classification,
    Embedding,
    EngineRequirements,
    Manifest,
    OutputInfo,
    RerankTemplate,
    SpecSummary,
    Thresholds,
    save,
)
from bei.byte_vectors import largest_of
from bei.certification.answers import HeldOut, Rows, ask_canary, ask_engine
from bei.certification.comparison import MIN_COSINES, compare, normalized, thresholds_of
from bei.certification.stored import keep
from bei.core import Engine, Limits
from bei.errors import BuildError, CheckpointError, CompileError, ConfigError, VerificationError
from bei_build import memory
from bei_build import reference as hf
from bei_build.chat_template import derive_template
from bei_build.checkpoint import Checkpoint, read_checkpoint, source_of
from bei_build.config import BuildConfig
from bei_build.families.base import UNLIMITED
from bei_build.heads import HeadChoice, tasks_of
from bei_build.late_interaction import prompt_of
from bei_build.location import locate
from bei_build.model_weights import ModelWeights
from bei_build.progress import Progress, in_bytes
from bei_build.remote_code import attention_of
from bei_build.spec import ModelSpec
from bei_build.targets import Compiler, Say, compiler_for
from bei_build.verification import (
    ENGINE_SHARE,
    Budget,
    EngineReference,
    Reference,
    ask_reference,
    held_out,
    uncertified,
)

# Opens a compiled engine; the runtime's loader is handed in, so that what is verified is what will be served.
OpenEngine = Callable[[Path, Manifest], Engine]


def build(config: BuildConfig, open_engine: OpenEngine, progress: Progress) -> Artifact:
    """Build ``config.model`` into the directory ``config.out``; an artifact that is there is replaced at the end.

    Raises BuildError and its subclasses, ConfigError, MissingDependencyError. A failed build leaves nothing behind.
    """
    # 1. Can this machine do it at all? Ask before reading gigabytes.
    compiler = compiler_for(config)
    precision = compiler.resolve_precision(config.precision)
    compiler.check_able()
    # 2. Checkpoint to spec.
    with progress.step("Read checkpoint") as step:
        location = locate(config.model, config.revision)
        # BuildConfig has checked that the pooling is one of POOLINGS.
        choice = HeadChoice(
            config.task,
            config.pooling,  # type: ignore[arg-type]
            config.score_tokens,
            config.token_embeddings,
            config.include_prompt,
        )
        checkpoint = read_checkpoint(
            location,
            choice,
            config.max_seq_len,
            config.document_length,
            config.attention,  # type: ignore[arg-type]
            config.adapter,
        )
        step.details.append(f"{checkpoint.spec.architecture}, {checkpoint.spec.num_parameters / 1e6:.1f} M parameters")
    longest = max(compiler.longest_by_default, config.document_length or 0)
    if config.max_seq_len is None and checkpoint.max_seq_len > longest:
        most = f"{checkpoint.max_seq_len:,}" if checkpoint.max_seq_len != UNLIMITED else "any number of"
        progress.note(f"the model takes {most} tokens; built for {longest:,} (see --max-seq-len)")
        checkpoint = replace(checkpoint, max_seq_len=longest)
    embedding, is_said = checkpoint.spec.head("embedding"), checkpoint.files.pooling or config.pooling
    if embedding and not is_said and checkpoint.family.has_layers:
        progress.note(f"the checkpoint does not name its pooling; using {'+'.join(embedding.pooling)}")
    out = Path(config.out or f"{location.model.replace('/', '--')}-{config.target}-{precision}").expanduser().resolve()
    _check_replaceable(out)
    _check_prompts(config, checkpoint)
    template = _rerank_template(config, checkpoint)
    limits = _limits(config, compiler, checkpoint.max_seq_len)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        with checkpoint.weights() as weights:
            # 3. Spec and weights to engine.
            with progress.step(f"Compile ({config.target}, {precision})") as step:
                requirements = _compile(compiler, checkpoint.spec, weights, precision, limits, scratch, step.say)
                step.details.append(in_bytes(_size(scratch / ENGINE_DIR)))
            for fallback in requirements.plan.fallbacks if requirements.plan else ():
                progress.note(fallback)
            # 4. Tokenizer.
            checkpoint.tokenizer.save(str(scratch / TOKENIZER), pretty=False)
            # 5. Manifest, without the files.
            with progress.step("Hash checkpoint"):
                manifest = _manifest(config, checkpoint, template, precision, limits, requirements)
            # 6. Is the engine what it should be?
            questions, budget = _held_out(checkpoint), Budget(config.verify_budget)
            absent = compiler.cannot_run()
            inputs = _Verification(config, compiler, checkpoint, weights, manifest, scratch, open_engine, questions)
            if absent is None:
                manifest, certificate = _verified(inputs, budget, progress)
            else:
                manifest, certificate = _to_be_verified(inputs, budget, progress)
                progress.note(
                    f"not verified, because {absent}: 'bei verify {out.name}', or the first 'bei serve', does it where "
                    "the engine runs; until then the certificate says PENDING"
                )
        # 7. Seal it and put it in place.
        with progress.step("Write artifact") as step:
            artifact = save(scratch, manifest, certificate)
            _put_in_place(scratch, out)
            step.details.append(in_bytes(_size(out)))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    progress.finish(f"Built {out}")
    return msgspec.structs.replace(artifact, path=out)


def _put_in_place(scratch: Path, out: Path) -> None:
    """Rename; what is there steps aside first, so that a crash between the two renames loses neither."""
    scratch.chmod(0o755)  # mkdtemp gives 0700
    if out.exists():
        _check_replaceable(out)  # again: the build took a while
        replaced = scratch.with_name(scratch.name + ".replaced")
        out.rename(replaced)
        scratch.rename(out)
        shutil.rmtree(replaced)
    else:
        scratch.rename(out)


def _check_replaceable(out: Path) -> None:
    if out.exists() and not _is_ours(out) and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an artifact; it will not be overwritten. Choose another --out.")


def _check_prompts(config: BuildConfig, checkpoint: Checkpoint) -> None:
    prompts = _prompts(config, checkpoint)
    is_said = config.include_prompt is not None or checkpoint.files.include_prompt is not None
    if prompts and not is_said and checkpoint.family.asks_about_prompts and checkpoint.spec.head("embedding"):
        raise ConfigError(
            "The model has prompts, and no file says whether their tokens count in the mean; of "
            f"{checkpoint.spec.architecture} some are pooled without them (INSTRUCTOR). Say it: --include-prompt or "
            "--no-include-prompt."
        )
    if config.default_prompt_name is not None and config.default_prompt_name not in prompts:
        known = ", ".join(prompts) or "none"
        raise ConfigError(f"default_prompt_name {config.default_prompt_name!r} is not among the prompts ({known}).")


def _prompts(config: BuildConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """The files' and the user's. A side of late interaction that has none under any name may be named too."""
    prompts = {**checkpoint.files.prompts, **dict(config.prompts)}
    unnamed = [side for side in checkpoint.roles if prompt_of(prompts, side) is None]
    return {**dict.fromkeys(unnamed, ""), **prompts}


def _is_ours(folder: Path) -> bool:
    """Whether bei wrote ``folder``, in whatever version: a manifest.json alone proves nothing, many tools write one."""
    try:
        keys = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, msgspec.Raw]).keys()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return {"schema_version", "bei_version"} <= keys


def _limits(config: BuildConfig, compiler: Compiler, max_seq_len: int) -> Limits:
    limits = compiler.default_limits(max_seq_len)
    if config.max_num_tokens is not None and config.max_num_tokens < max_seq_len:
        raise ConfigError(
            f"max_num_tokens {config.max_num_tokens} cannot hold one sequence of max_seq_len {max_seq_len}: "
            "raise --max-num-tokens or lower --max-seq-len."
        )
    return replace(
        limits,
        max_num_tokens=config.max_num_tokens or limits.max_num_tokens,
        max_batch_size=config.max_batch_size or limits.max_batch_size,
    )


def _compile(
    compiler: Compiler, spec: ModelSpec, weights: ModelWeights, precision: str, limits: Limits, root: Path, say: Say
) -> EngineRequirements:
    folder = root / ENGINE_DIR
    folder.mkdir()
    return compiler.compile(spec, weights, precision, limits, folder, say)


def _manifest(
    config: BuildConfig,
    checkpoint: Checkpoint,
    template: RerankTemplate | None,
    precision: str,
    limits: Limits,
    requirements: EngineRequirements,
) -> Manifest:
    spec, files, labels = checkpoint.spec, checkpoint.files, checkpoint.labels
    embedding = _embedding(config, checkpoint)
    if embedding and requirements.unit_vectors and not embedding.normalize:
        raise CompileError(
            f"The checkpoint's vectors keep their lengths, and engines for {config.target} make them unit length: "
            "build with --normalize if that is what you want, or with --target cpu."
        )
    tasks = [task for head in spec.heads for task in tasks_of(head, spec.hidden_size)]
    if template is not None:  # /predict and /classify would score texts without it
        tasks = ["rerank"]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        bei_version=__version__,
        name=config.name or checkpoint.location.model,
        source=source_of(checkpoint),
        tasks=list(dict.fromkeys(tasks)),
        spec=SpecSummary(
            family=spec.family,
            architecture=spec.architecture,
            num_layers=len(spec.layers) + (len(spec.decoder.layers) if spec.decoder else 0),
            hidden_size=spec.hidden_size,
            num_heads=spec.layers[0].attention.num_heads if spec.layers else 0,
            vocab_size=spec.embeddings.vocab_size,
            num_parameters=spec.num_parameters,
            attention=attention_of(spec) if spec.layers and not spec.decoder else None,
            attention_asked=config.attention is not None,
            adapter=checkpoint.adapter.name if checkpoint.adapter else None,
        ),
        outputs=[
            OutputInfo(
                name=head.output,
                dimension=spec.dimensions[head.output],
                per_token=not head.pooling,
                unit_length=head.output == "token_embedding" and head.token_layers != (),
            )
            for head in spec.heads
        ],
        embedding=embedding,
        classification=Classification(labels=list(labels.names), function=labels.function) if labels else None,
        rerank_template=template,
        prompts=_prompts(config, checkpoint),
        default_prompt_name=config.default_prompt_name or files.default_prompt_name,
        roles=dict(checkpoint.roles),
        target=config.target,
        precision=precision,
        engine=requirements,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        verification="none",  # and the files: sealing the artifact says them
        files=[],
    )


def _embedding(config: BuildConfig, checkpoint: Checkpoint) -> Embedding | None:
    head, files = checkpoint.spec.head("embedding"), checkpoint.files
    if head is None:
        return None
    # Where neither modules.json nor the config says it: clients of embedding APIs expect unit length.
    own = getattr(checkpoint.config, "unit_length", None)
    normalize = next(choice for choice in (config.normalize, files.normalize, own, True) if choice is not None)
    return Embedding(
        pooling="+".join(head.pooling),
        normalize=normalize,
        similarity=files.similarity,
        matryoshka_dimensions=list(files.matryoshka_dimensions) if files.matryoshka_dimensions else None,
        int8_largest=None,  # the engine's answers say it
        pools_prompt=checkpoint.spec.pools_prompt,
    )


def _with_bytes(manifest: Manifest, rows: Rows) -> Manifest:
    """``manifest`` with the range of vectors of bytes, by ``rows`` for the held-out texts."""
    embeddings = rows.get("embedding")
    if manifest.embedding is None or not embeddings:
        return manifest
    largest = largest_of(normalized(np.stack(embeddings)).astype(np.float32))
    return msgspec.structs.replace(
        manifest, embedding=msgspec.structs.replace(manifest.embedding, int8_largest=largest)
    )


def _rerank_template(config: BuildConfig, checkpoint: Checkpoint) -> RerankTemplate | None:
    """What the user says, else what the checkpoint's chat template says. Raises CheckpointError."""
    if config.rerank_body:
        return RerankTemplate(
            prefix=config.rerank_prefix,
            body=config.rerank_body,
            suffix=config.rerank_suffix,
            instruction=config.rerank_instruction,
        )
    files, head = checkpoint.files, checkpoint.spec.heads[0]
    if head.output != "logits":
        return None
    if files.chat is None:
        if files.default_prompt_name is not None and files.prompts[files.default_prompt_name]:
            raise CheckpointError(
                f"The checkpoint puts its prompt {files.default_prompt_name!r} in front of every query, which bei does "
                "not do for rerankers: say what a pair is to be with --rerank-body."
            )
        return None
    if "rerank" not in tasks_of(head, checkpoint.spec.hidden_size):
        raise CheckpointError(
            "The checkpoint puts texts into a chat template before it classifies them; bei does so for rerankers only."
        )
    default = files.prompts.get(files.default_prompt_name or "")
    return derive_template(checkpoint.folder, checkpoint.config.model_type, files.chat, default, checkpoint.tokenizer)


def _held_out(checkpoint: Checkpoint) -> HeldOut:
    expansion = next((role.expansion for role in checkpoint.roles.values() if role.expansion), None)
    return held_out(checkpoint.tokenizer, checkpoint.spec, checkpoint.max_seq_len, expansion)


@dataclass(frozen=True)
class _Verification:
    """What verifying takes. ``manifest`` and ``root`` are of the artifact under construction."""

    config: BuildConfig
    compiler: Compiler
    checkpoint: Checkpoint
    weights: ModelWeights
    manifest: Manifest
    root: Path
    open_engine: OpenEngine
    questions: HeldOut

    @property
    def outputs(self) -> list[str]:
        """Names, the canary's first."""
        return [head.output for head in self.checkpoint.spec.heads]

    @property
    def thresholds(self) -> Thresholds:
        """As the user says, else the precision's."""
        least = self.config.min_cosine
        return thresholds_of(MIN_COSINES[self.manifest.precision] if least is None else least)


def _verified(inputs: _Verification, budget: Budget, progress: Progress) -> tuple[Manifest, Certificate]:
    """The engine is closed before the reference is opened: each may fill the memory. Raises VerificationError."""
    config, questions = inputs.config, inputs.questions
    with progress.step("Run engine") as step:
        with closing(inputs.open_engine(inputs.root / ENGINE_DIR, inputs.manifest)) as engine:
            if config.verify:
                answers = ask_engine(engine, questions, inputs.outputs, lambda: budget.is_used(ENGINE_SHARE))
            else:
                answers = ask_canary(engine, questions, inputs.outputs[0])
        step.details.append(f"{answers.num_texts} texts" if config.verify else "canary only")
    manifest = _with_bytes(inputs.manifest, answers.rows)
    if not config.verify:
        progress.note("not verified, as --no-verify asked; the certificate says so")
        return manifest, uncertified(answers, questions)
    with progress.step("Verify") as step, _reference(inputs) as reference:
        encodings = questions.encodings[: answers.num_texts]
        expected = ask_reference(reference, encodings, inputs.outputs, budget)
        certificate = compare(answers, expected, questions, inputs.thresholds)
        step.details += _figures(certificate)
    _check_certificate(config, certificate, progress)
    return manifest, certificate


def _to_be_verified(inputs: _Verification, budget: Budget, progress: Progress) -> tuple[Manifest, Certificate]:
    """The reference's answers are kept in the artifact, for the machine that the engine runs on."""
    if not inputs.config.verify:
        raise ConfigError(
            f"--no-verify: engines for {inputs.config.target} cannot run here, so nothing would say what this one is "
            "to answer. Leave it out; --verify-budget SECONDS bounds what is kept for verifying it."
        )
    questions = inputs.questions
    with progress.step("Ask reference") as step, _reference(inputs) as reference:
        expected = ask_reference(reference, questions.encodings, inputs.outputs, budget)
        canary = reference.run([questions.canary], inputs.outputs[:1])[inputs.outputs[0]][0]
        step.details.append(f"{expected.num_texts} texts, {expected.name}")
    allow = inputs.config.allow_below_threshold
    certificate = keep(inputs.root, expected, questions, canary, inputs.thresholds, allow_below_threshold=allow)
    return _with_bytes(inputs.manifest, expected.rows), certificate


@contextmanager
def _reference(inputs: _Verification) -> Iterator[Reference]:
    """The HF model, or bei's own FP32 engine, compiled for the occasion."""
    config, checkpoint = inputs.config, inputs.checkpoint
    is_known = checkpoint.family.reference_class is not None
    if config.reference == "hf" or (config.reference == "auto" and is_known and hf.is_available()):
        if not is_known:
            raise ConfigError(
                f"--reference hf: transformers has no {checkpoint.spec.architecture}. Use --reference engine."
            )
        if not hf.is_available():
            raise ConfigError("--reference hf needs torch, which is not installed: use --reference engine.")
        yield hf.HFReference(checkpoint, inputs.weights)
        return
    memory.require(4 * checkpoint.spec.num_parameters, "The FP32 engine to verify with")
    # Where the target's engines cannot run, or not in FP32, the CPU's can.
    is_able = "fp32" in inputs.compiler.precisions and inputs.compiler.cannot_run() is None
    target = config.target if is_able else "cpu"
    compiler = inputs.compiler if target == config.target else compiler_for(BuildConfig(model=config.model))
    compiler.check_able()
    with tempfile.TemporaryDirectory(dir=inputs.root) as root:
        limits = inputs.manifest.limits
        needs = _compile(compiler, checkpoint.spec, inputs.weights, "fp32", limits, Path(root), lambda _: None)
        manifest = msgspec.structs.replace(inputs.manifest, target=target, precision="fp32", engine=needs)
        with closing(inputs.open_engine(Path(root) / ENGINE_DIR, manifest)) as engine:
            yield EngineReference(engine, f"{needs.compiler} engine, FP32, one text at a time")


def _figures(certificate: Certificate) -> list[str]:
    """The certificate in a line."""
    what = "self-consistency: " if certificate.kind == "self-consistency" else ""
    figures = (
        f"{one.output}: mean cosine {one.cosine_mean:.6f}, lowest {one.cosine_min:.6f}" for one in certificate.outputs
    )
    count = f"{certificate.num_texts} of {certificate.num_held_out_texts} texts"
    return [f"{what}{'; '.join(figures)}, against {certificate.reference}, {count}"]


def _check_certificate(config: BuildConfig, certificate: Certificate, progress: Progress) -> None:
    if certificate.passed:
        return
    missed = next(agreement for agreement in certificate.outputs if agreement.failures)
    message = (
        f"{missed.output}: {', '.join(missed.failures)}, against {certificate.reference}; "
        f"worst text: {missed.worst_texts[0][:60]!r}"
    )
    if not config.allow_below_threshold:
        raise VerificationError(
            f"Verification failed: {message}. Choose a higher precision, lower --min-cosine, "
            "or keep the engine with --allow-below-threshold."
        )
    progress.note(f"kept although {message}")


def _size(folder: Path) -> int:
    if not folder.is_dir():
        raise BuildError(f"{folder} was not written. This is a bug.")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
