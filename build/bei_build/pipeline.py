"""``build``: checkpoint to artifact, in numbered steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bei.artifact.adapter_scales import AdapterScale
from bei.artifact.manifest import (
    ENGINE_DIR,
    SCHEMA_VERSION,
    TOKEN_WEIGHTS,
    TOKENIZER,
    Adapters,
    Artifact,
    CheckpointSource,
    Classification,
    ClassifyTemplate,
    DecideTemplate,
    Embedding,
    EngineRequirements,
    Manifest,
    OutputInfo,
    RerankTemplate,
    SpecSummary,
)
from bei.artifact.sides import SIDES, Routes, names_of
from bei.artifact.signing_keys import exposure, private_key
from bei.artifact.token_weights import write_token_weights
from bei.artifact.validation import name_fault
from bei.core import Limits
from bei.errors import CheckpointError, CompileError, ConfigError
from bei.utils.units import shown_size
from bei.version import __version__
from bei_build.applicable_settings import check_applicable
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.decoder_processor import pair_template
from bei_build.checkpoint.heads import HeadChoice, tasks_of
from bei_build.checkpoint.image_tower import (
    ImageCheckpoint,
    has_image_tower,
    read_image_tower,
    read_images_alone,
    reads_images_alone,
    without_images,
)
from bei_build.checkpoint.label_tower import read_label_tower
from bei_build.checkpoint.locate import Location, locate
from bei_build.checkpoint.read import read_checkpoint, source_of
from bei_build.checkpoint.remote_code import attention_of
from bei_build.checkpoint.transformers_versions import version_notes
from bei_build.config import BuildConfig
from bei_build.families.base import UNLIMITED
from bei_build.image_model import build_image_model, check_image_model
from bei_build.job import Job, OpenEngine
from bei_build.limits import limits_of
from bei_build.output_folder import check_names, check_outside_artifacts, output_folder, scratch_folder, seal, size_of
from bei_build.progress import Progress
from bei_build.quantization.calibrate import Calibration, calibrate
from bei_build.reference.held_out import held_out_texts
from bei_build.spec.dtypes import DType
from bei_build.spec.precision import PRECISIONS
from bei_build.targets.base import Compiler, Numerics
from bei_build.targets.choose import compiler_for, with_target
from bei_build.tokenizer.chat_template import derive_template
from bei_build.tokenizer.continuation import continuing
from bei_build.tokenizer.token_table import check_table
from bei_build.verification.certify import VerificationJob, certify
from bei_build.verification.emulate import meet_thresholds
from bei_build.verification.images import add_image_tower, check_buildable
from bei_build.verification.labels import build_label_tower
from bei_build.verification.questions import Questions, check_verifiable
from bei_build.verification.speed import compare_speed

if TYPE_CHECKING:
    import tokenizers
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def build(config: BuildConfig, open_engine: OpenEngine, progress: Progress) -> Artifact:
    """Build ``config.model`` into the directory ``config.out``; an artifact that is there is replaced at the end.

    Raises BuildError and its subclasses, ConfigError, MissingDependencyError, DiskFullError. A failed build
    leaves nothing behind.
    """
    # 1. Can this machine build it at all? Checked before gigabytes are read.
    check_outside_artifacts(config)
    config = with_target(config)
    compiler = compiler_for(config)
    precision = compiler.resolve_precision(config.precision)
    compiler.check_able()
    key = _signing_key(config, progress)
    # 2. Checkpoint to spec.
    with progress.step("Read checkpoint") as step:
        location = locate(config.model, config.revision)
        labels = None
        if reads_texts := config.texts and not reads_images_alone(location):
            checkpoint = _read(config, location, precision)
            images = _image_tower(config, checkpoint, compiler, precision, progress)
            checkpoint = checkpoint if images is not None else without_images(checkpoint)
            labels = _label_tower(config, checkpoint, compiler)
        else:
            images = read_images_alone(location)
            checkpoint = images.checkpoint
            check_image_model(config, images, compiler, precision)
        step.details.append(f"{checkpoint.spec.architecture}, {checkpoint.spec.num_parameters / 1e6:.1f} M parameters")
    if images is not None and not reads_texts:
        check_names(config, location)
        out = output_folder(config, location, precision, progress)
        return build_image_model(config, images, compiler, precision, out, key, open_engine, progress)
    for difference in version_notes(checkpoint, config.attention):  # type: ignore[arg-type]
        progress.note(difference)
    longest = max(compiler.longest_by_default, config.document_length or 0)
    if config.max_seq_len is None and checkpoint.max_seq_len > longest:
        most = f"{checkpoint.max_seq_len:,}" if checkpoint.max_seq_len != UNLIMITED else "any number of"
        progress.note(f"the model takes {most} tokens; built for {longest:,} (see --max-seq-len)")
        checkpoint = replace(checkpoint, max_seq_len=longest)
    said = checkpoint.files.max_seq_length
    if config.max_seq_len is None and said is not None and said > checkpoint.max_seq_len:
        most = f"{checkpoint.max_seq_len:,}"
        progress.note(f"the checkpoint's max_seq_length is {said:,}; built for {most}: bei cuts longer texts there")
    embedding, is_said = checkpoint.spec.head("embedding"), checkpoint.files.pooling or config.pooling
    if embedding and not is_said and checkpoint.family.has_layers:
        progress.note(f"the checkpoint does not name its pooling; using {'+'.join(embedding.pooling)}")
    if (routing := checkpoint.files.routing) and routing.absent:
        progress.note(f"only the route {routing.default} of the checkpoint's Router is built; it reads no other texts")
    check_names(config, location)
    out = output_folder(config, location, precision, progress)
    _check_prompts(config, checkpoint)
    template = _rerank_template(config, checkpoint)
    limits = limits_of(config, compiler, checkpoint.max_seq_len)
    check_verifiable(config, compiler, checkpoint)
    with scratch_folder(out, progress) as scratch:
        with checkpoint.weights() as weights:
            with progress.step("Hash checkpoint"):
                source = source_of(checkpoint, labels)

            def describe(needs: EngineRequirements) -> Manifest:
                return _manifest(config, checkpoint, source, template, precision, limits, needs)

            def describe_labels(config: BuildConfig, limits: Limits, needs: EngineRequirements) -> Manifest:
                assert labels is not None
                return _manifest(config, labels, source, None, precision, limits, needs)

            job = Job(config, compiler, precision, checkpoint, weights, limits, scratch, describe, open_engine)
            # 3. Tokenizer. The engine's inputs depend on it, so it comes first.
            checkpoint.tokenizer.save(str(scratch / TOKENIZER), pretty=False)
            built_labels = None if labels is None else build_label_tower(job, labels, describe_labels, progress)
            questions = Questions(job, progress, None if built_labels is None else built_labels.vectors)
            # 4. Scales, where the precision needs them.
            scales = _scales(job, questions, progress)
            # 5. Spec and weights to engine.
            with progress.step(f"Compile ({config.target}, {precision})") as step:
                requirements = job.compile(Numerics(precision, scales.quantization if scales else None), step.say)
                step.details.append(shown_size(size_of(scratch / ENGINE_DIR)))
            for compiled in (requirements.plan, requirements.package):
                for fallback in compiled.fallbacks if compiled else ():
                    progress.note(fallback)
            _write_table(checkpoint, scratch, progress)
            # 6. Does the engine match its reference?
            work = VerificationJob(job, describe(requirements), questions, scales)
            manifest, certificate = certify(work, out.name, progress)
            if scales is not None and config.target == "cpu":
                compare_speed(job, manifest, progress)
            if built_labels is not None:
                manifest, certificate = built_labels.added(manifest, certificate)
            if images is not None:
                manifest, agreement = add_image_tower(job, images, manifest, progress)
                passed = certificate.passed and agreement.passed
                certificate = msgspec.structs.replace(certificate, images=agreement, passed=passed)
        # 7. Seal it and put it in place.
        artifact = seal(scratch, out, manifest, certificate, key, progress)
    progress.finish(f"Built {out}")
    return artifact


def _read(config: BuildConfig, location: Location, precision: str) -> Checkpoint:
    """The checkpoint as the settings want it read. Raises CheckpointError and its subclasses, ConfigError."""
    # BuildConfig has checked that pooling, attention and tokenizer are of the words that mypy asks for.
    choice = HeadChoice(
        config.task,
        config.pooling,  # type: ignore[arg-type]
        config.score_tokens,
        config.token_embeddings,
        config.include_prompt,
        config.relevant_label,
        config.score_labels,
    )
    checkpoint = read_checkpoint(
        location,
        choice,
        config.max_seq_len,
        config.document_length,
        config.attention,  # type: ignore[arg-type]
        config.adapter,
        config.tokenizer,  # type: ignore[arg-type]
        config.route,
        {name: locate(path).folder for name, path in config.lora_paths.items()},
    )
    check_applicable(config, checkpoint)
    _check_range(checkpoint, precision)
    checkpoint.weights().close()  # invalid weights are reported before anything else is done
    return checkpoint


def _check_range(checkpoint: Checkpoint, precision: str) -> None:
    """Raise ConfigError for a model whose states the type of ``precision`` cannot hold."""
    if checkpoint.family.overflows_fp16 and PRECISIONS[precision].storage is DType.FP16:
        raise ConfigError(
            f"States of {checkpoint.spec.architecture} are larger than FP16 can hold: build with --precision bf16 or "
            "fp32."
        )


def _image_tower(
    config: BuildConfig, checkpoint: Checkpoint, compiler: Compiler, precision: str, progress: Progress
) -> ImageCheckpoint | None:
    """The checkpoint's image tower, if it is to be built. Raises CheckpointError, ConfigError,
    MissingDependencyError."""
    most = config.max_image_pixels
    if not config.images or not has_image_tower(checkpoint):
        if most is not None:
            raise ConfigError("max_image_pixels is a setting of images, and none are built: leave it out.")
        return None
    images = read_image_tower(checkpoint, most, _rerank_template(config, checkpoint))
    if most is not None:
        progress.note(f"images have {most:,} pixels at most, as asked for; the checkpoint's may have more")
    if images is None:
        progress.note(
            "only the text tower is built: the checkpoint has no preprocessor_config.json, which says how images are "
            "read"
        )
        return None
    check_buildable(config, precision, compiler, has_texts=True)
    limits_of(config, compiler, images.checkpoint.max_seq_len)
    images.checkpoint.weights().close()
    return images


def _label_tower(config: BuildConfig, checkpoint: Checkpoint, compiler: Compiler) -> Checkpoint | None:
    """The checkpoint's encoder of labels, if it has one. Raises CheckpointError, ConfigError."""
    labels = read_label_tower(checkpoint, config.tokenizer, config.max_seq_len)  # type: ignore[arg-type]  # as in _read
    if labels is not None:
        limits_of(config, compiler, labels.max_seq_len)
        labels.weights().close()
    return labels


def _write_table(checkpoint: Checkpoint, scratch: Path, progress: Progress) -> None:
    """Write the table of the side without an engine, after comparing it with the library's."""
    routing = checkpoint.files.routing
    if checkpoint.token_weights is None or routing is None or routing.table is None:
        return
    side, folder = routing.table
    with progress.step(f"Write the table of the {side} side") as step:
        write_token_weights(scratch / TOKEN_WEIGHTS, checkpoint.token_weights)
        vocab_size = checkpoint.spec.embeddings.vocab_size
        count = check_table(scratch, folder, checkpoint.tokenizer_settings, vocab_size, held_out_texts())
        step.details.append(f"{vocab_size:,} weights; {count} texts as in sentence-transformers' module")


def _signing_key(config: BuildConfig, progress: Progress) -> Ed25519PrivateKey | None:
    """Read the key before anything is computed, so that a wrong passphrase is reported first."""
    if config.sign is None:
        return None
    key = private_key(config.sign, config.sign_passphrase, config.sign_passphrase_file)
    if warning := exposure(config.sign):
        progress.note(warning)
    return key


def _scales(job: Job, questions: Questions, progress: Progress) -> Calibration | None:
    """The engine's quantization; None where its precision needs no calibration."""
    number_format = PRECISIONS[job.precision].quantized
    if number_format is None or job.precision not in job.compiler.calibrated:
        return None
    found = calibrate(job, number_format, progress)
    # Where the engine cannot run, it is emulated instead: errors should show on the machine where they can be fixed.
    return found if job.compiler.cannot_run() is None else meet_thresholds(job, found, questions, progress)


def _check_prompts(config: BuildConfig, checkpoint: Checkpoint) -> None:
    prompts = _prompts(config, checkpoint)
    for name in prompts:
        if fault := name_fault(name):
            where = "the setting prompts" if name in config.prompts else "the checkpoint's files"
            raise ConfigError(f"A prompt's name in {where} cannot be kept ({fault}): rename it.")
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
    """Prompts of the files and the user. The names of sides or routes without a prompt are allowed too."""
    prompts = {**checkpoint.files.prompts, **dict(config.prompts)}
    routing = checkpoint.files.routing
    sides = [*checkpoint.roles, *([routing.default] if routing and routing.default in SIDES else [])]
    unnamed = [side for side in sides if not any(name in prompts for name in names_of(side))]
    return {**dict.fromkeys(unnamed, ""), **prompts}


def _manifest(
    config: BuildConfig,
    checkpoint: Checkpoint,
    source: CheckpointSource,
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
    tasks = [*dict.fromkeys(task for head in spec.heads for task in tasks_of(head, spec.hidden_size))]
    if template is not None:  # /predict and /classify would score texts without it
        tasks = ["rerank"]
    if config.classify_body:
        tasks = ["classify"]
    if config.decide_body:
        tasks = ["decide"]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        bei_version=__version__,
        name=config.name or checkpoint.location.name,
        source=source,
        tasks=list(dict.fromkeys(tasks)),
        spec=SpecSummary(
            family=spec.family,
            architecture=spec.architecture,
            num_layers=len(spec.layers) + (len(spec.decoder.layers) if spec.decoder else 0),
            hidden_size=spec.hidden_size,
            num_heads=spec.attentions[0].num_heads if spec.attentions else 0,
            vocab_size=spec.embeddings.vocab_size,
            num_parameters=spec.num_parameters,
            attention=attention_of(spec) if spec.layers and not spec.decoder else None,
            attention_asked=config.attention is not None,
            adapter=checkpoint.adapter.name if checkpoint.adapter and checkpoint.adapter.names else None,
            adapter_scales=_adapter_scales(checkpoint) or msgspec.UNSET,
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
        tokenization=checkpoint.tokenization,
        prompts=_prompts(config, checkpoint),
        default_prompt_name=config.default_prompt_name or files.default_prompt_name,
        roles=dict(checkpoint.roles),
        target=config.target,
        precision=precision,
        engine=requirements,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        verification="none",  # and the files: sealing the artifact sets them
        files=[],
        routes=_routes(checkpoint),
        adapters=_adapters(checkpoint),
        extraction=checkpoint.extraction or msgspec.UNSET,
        listwise=checkpoint.listwise or msgspec.UNSET,
        labelling=checkpoint.labelling or msgspec.UNSET,
        option_markers=checkpoint.option_markers or msgspec.UNSET,
        classify_template=_classify_template(config),
        decide_template=_decide_template(config, checkpoint.tokenizer),
    )


def _adapter_scales(checkpoint: Checkpoint) -> dict[str, AdapterScale]:
    found = {} if checkpoint.adapter is None else checkpoint.adapter.scales
    return found if checkpoint.adapters is None else found | checkpoint.adapters.scales


def _adapters(checkpoint: Checkpoint) -> Adapters | msgspec.UnsetType:
    found = checkpoint.adapters
    if found is None:
        return msgspec.UNSET
    return Adapters(names=[*found.names], tasks=[*found.tasks], is_required=found.is_required)


def _routes(checkpoint: Checkpoint) -> Routes | None:
    """The texts that the artifact's modules read. Raises CheckpointError."""
    routing = checkpoint.files.routing
    if routing is None:
        return None
    if checkpoint.spec.heads[0].output in ("logits", "token_logits"):
        raise CheckpointError(
            "The checkpoint's Router has several routes and gives scores; bei builds only embedders from such a Router."
        )
    return Routes(default=routing.default, absent=[*routing.absent])


def _embedding(config: BuildConfig, checkpoint: Checkpoint) -> Embedding | None:
    head, files = checkpoint.spec.head("embedding"), checkpoint.files
    if head is None:
        return None
    # If neither modules.json nor the config says it: clients of embedding APIs expect unit length.
    own = getattr(checkpoint.config, "unit_length", None)
    normalize = next(choice for choice in (config.normalize, files.normalize, own, True) if choice is not None)
    return Embedding(
        pooling="+".join(head.pooling),
        normalize=normalize,
        similarity=files.similarity,
        matryoshka_dimensions=list(files.matryoshka_dimensions) if files.matryoshka_dimensions else None,
        int8_largest=None,  # set from the engine's answers
        pools_prompt=checkpoint.spec.pools_prompt,
        layers_follow_pooling=head.layers != (),
    )


def _classify_template(config: BuildConfig) -> ClassifyTemplate | msgspec.UnsetType:
    if not config.classify_body:
        return msgspec.UNSET
    return ClassifyTemplate(prefix=config.classify_prefix, body=config.classify_body, suffix=config.classify_suffix)


def _decide_template(config: BuildConfig, tokenizer: tokenizers.Tokenizer) -> DecideTemplate | msgspec.UnsetType:
    if not config.decide_body:
        return msgspec.UNSET
    option = msgspec.UNSET if config.score_tokens else continuing(config.decide_option, tokenizer)
    return DecideTemplate(body=config.decide_body, option=option)


def _rerank_template(config: BuildConfig, checkpoint: Checkpoint) -> RerankTemplate | None:
    """The user's template, else the one from the checkpoint's chat template. Raises CheckpointError."""
    if config.rerank_body and pair_template(checkpoint) is not None:
        raise ConfigError(f"{checkpoint.spec.architecture} reads pairs in a text of its own: leave rerank_body out.")
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
    if (own := pair_template(checkpoint)) is not None:
        return own
    if files.chat is None:
        return None
    if "rerank" not in tasks_of(head, checkpoint.spec.hidden_size):
        raise CheckpointError(
            "The checkpoint puts texts into a chat template before it classifies them; bei does so for rerankers only."
        )
    default = files.prompts.get(files.default_prompt_name or "")
    return derive_template(checkpoint.folder, checkpoint.config.model_type, files.chat, default, checkpoint.tokenizer)
