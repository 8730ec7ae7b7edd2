"""The image tower of a build: compiled, and verified on drawn images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import msgspec

from bei.artifact.certificate.canary import canary_levels
from bei.artifact.certificate.record import Agreement, ImageAgreement, Thresholds
from bei.artifact.certificate.thresholds import min_cosine_of, thresholds_of
from bei.artifact.manifest import IMAGE_ENGINE_DIR, EngineRequirements, Manifest
from bei.core import Engine, Float32Array
from bei.errors import CompileError, ConfigError, VerificationError
from bei.image.decode import ImageLimits, check_able
from bei.image.encoder import ImageEncoder
from bei.image.source import ImageInput
from bei.port import STATES
from bei.verification.comparison import ReferenceAnswers, compare, kept_canary
from bei.verification.engine_answers import EngineAnswers, HeldOut, Rows, ask_canary, ask_engine
from bei.verification.stored_answers import output_meaning
from bei_build.checkpoint.image_tower import ImageCheckpoint
from bei_build.config import BuildConfig
from bei_build.job import Job, open_fp32
from bei_build.limits import limits_of
from bei_build.progress import Progress
from bei_build.reference import hf_model as hf
from bei_build.reference.held_out import EngineReference
from bei_build.reference.held_out_images import HeldOutImage, held_out_images
from bei_build.reference.hf_images import HFImageReference, ScoreLayer
from bei_build.spec.head_layers import HeadLayer
from bei_build.spec.parts import DenseSpec
from bei_build.spec.precision import PRECISIONS
from bei_build.targets.base import Compiler, Numerics

_CANARY = "ramps and squares"
# The drawn images are far below these.
_LIMITS = ImageLimits(max_bytes=10_000_000, max_pixels=10_000_000)
_TARGETS = ("cpu", "cuda", "cuda-twin", "tensorrt", "tensorrt-rtx")


def check_buildable(config: BuildConfig, precision: str, compiler: Compiler, *, has_texts: bool) -> None:
    """Raise ConfigError or MissingDependencyError for an image tower that could not be built. ``has_texts``: a text
    tower, or a decoder that reads the tower's states, is built beside it."""
    target = config.target
    check_able("Building a model that reads images")
    otherwise = ", or the text tower alone with --no-images" if has_texts else ""
    if target not in _TARGETS:
        raise ConfigError(
            f"Image towers are built for the targets {', '.join(_TARGETS)}, not for {target}: use --target "
            f"cpu{otherwise}."
        )
    if (absent := compiler.cannot_run()) is not None:
        raise ConfigError(
            f"Image towers are verified where they are built, and {absent}: build there, or use --target "
            f"cpu{otherwise}."
        )
    if has_texts and config.plan_of is not None:
        raise ConfigError(f"plan_of lends one plan, and two towers have two: leave it out{otherwise}.")
    if PRECISIONS[precision].quantized is not None:
        raise ConfigError(
            f"Image towers are not quantized, and --precision {precision} is: build with bf16 or fp32{otherwise}."
        )


def check_reference(config: BuildConfig, images: ImageCheckpoint) -> None:
    """Raise ConfigError where the user asks for a reference that is not possible."""
    if not config.verify or config.reference != "hf":
        return
    if images.checkpoint.family.reference_class is None:
        raise ConfigError(
            f"--reference hf: transformers has no {images.checkpoint.spec.architecture}. Use --reference engine."
        )
    if not hf.is_available():
        raise ConfigError("--reference hf needs torch, which is not installed: use --reference engine.")


def encoder_of_tower(images: ImageCheckpoint) -> ImageEncoder:
    """The runtime's encoder of the tower's images."""
    patches = images.patches
    return ImageEncoder(
        images.processor,
        images.image_size,
        patches.size,
        num_leading=patches.num_leading,
        limits=_LIMITS,
        sequence=images.sequence,
    )


def add_image_tower(
    job: Job, images: ImageCheckpoint, manifest: Manifest, progress: Progress
) -> tuple[Manifest, ImageAgreement]:
    """Compile and verify the tower; returns ``manifest`` with it. ``job`` is the text tower's.

    Raises CompileError, VerificationError, and the errors of engine and reference.
    """
    limits = limits_of(job.config, job.compiler, images.checkpoint.max_seq_len)

    def whole(needs: EngineRequirements) -> Manifest:
        return msgspec.structs.replace(manifest, images=images.tower(needs, limits))

    with images.checkpoint.weights() as weights:
        own = replace(
            job,
            checkpoint=images.checkpoint,
            weights=weights,
            limits=limits,
            describe=whole,
            engine_dir=IMAGE_ENGINE_DIR,
        )
        decoder = job if images.sequence is not None else None
        described, agreement, _ = compile_and_verify(own, images, progress, decoder)
    return described, agreement


def compile_and_verify(
    job: Job, images: ImageCheckpoint, progress: Progress, decoder: Job | None = None
) -> tuple[Manifest, ImageAgreement, Rows]:
    """Compile and verify the tower, which ``job`` is of; returns what ``job.describe`` makes of its engine, and the
    engine's rows. ``decoder``: that of the engine which reads the tower's states, and gives the rows. Raises what
    ``add_image_tower`` raises."""
    with progress.step(f"Compile images ({job.config.target}, {job.precision})") as step:
        needs = job.compile(Numerics(job.precision), step.say)
        step.details.append(f"{images.checkpoint.spec.num_parameters / 1e6:.1f} M parameters")
    if needs.unit_vectors:
        raise CompileError(f"Engines for {job.config.target} give no vectors of images that compare with texts'.")
    described = job.describe(needs)
    own = replace(job, describe=lambda needs: job.describe(needs).of_images)
    agreement, rows = _verified(own, images, described, progress, decoder)
    return described, agreement, rows


def _verified(
    job: Job, images: ImageCheckpoint, described: Manifest, progress: Progress, decoder: Job | None
) -> tuple[ImageAgreement, Rows]:
    from PIL import Image

    output, manifest = images.head, described.of_images

    encoder, files = encoder_of_tower(images), held_out_images()
    # The server's way: a processor may resize what is of the model's size too, before it crops.
    *encodings, canary = encoder.encode(
        [
            *(ImageInput(content) for _, content in files),
            ImageInput(Image.fromarray(canary_levels(*images.image_size))),
        ]
    )
    held_out = HeldOut([name for name, _ in files], encodings, _CANARY, canary)
    with progress.step("Run image engine") as step:
        asked, folder = held_out, job.root / job.engine_dir
        if decoder is not None:
            if not job.config.verify:
                asked = replace(held_out, texts=[], encodings=[])
            with closing(job.open_engine(folder, manifest)) as tower:
                asked = _with_states(tower, asked)
            folder, manifest = decoder.root / decoder.engine_dir, described
        with closing(job.open_engine(folder, manifest)) as engine:
            if not job.config.verify:
                answers = _of_image(ask_canary(engine, asked, output), images)
                return _agreement(answers, files, kept_canary(answers.canary, output)), answers.rows
            answers = _of_image(ask_engine(engine, asked, [output], tell=step.tell), images)
        step.details.append(f"{answers.num_texts} images")
    with progress.step("Verify images") as step:
        expected = _expected(job, images, files, held_out, decoder)
        thresholds = _thresholds(decoder or job, is_decoder=decoder is not None)
        found = compare(answers, expected, held_out, thresholds, meaning=output_meaning(manifest))
        (row,) = found.outputs
        step.details.append(f"mean cosine {row.cosine_mean:.6f}, lowest {row.cosine_min:.6f}, against {expected.name}")
    if row.failures:
        message = f"images: {', '.join(row.failures)}; worst image: {row.worst_texts[0].text}"
        if not job.config.allow_below_threshold:
            raise VerificationError(
                f"Verification failed: {message}. To do: choose a higher precision, or lower --min-cosine, or keep the "
                "engine with --allow-below-threshold."
            )
        progress.note(f"kept although {message}")
    return _agreement(answers, files, found.canary_row, expected, thresholds, row), answers.rows


def _of_image(answers: EngineAnswers, images: ImageCheckpoint) -> EngineAnswers:
    """``answers`` with the canary's vectors that have seen the image."""
    canary = answers.canary
    return answers if images.sequence is None else replace(answers, canary=images.sequence.of_image(canary))


def _with_states(tower: Engine, asked: HeldOut) -> HeldOut:
    """``asked`` as a decoder reads it, with the states of ``tower``'s engine."""
    encodings = [*asked.encodings, asked.canary]
    *own, last = (one for encoding in encodings for one in encoding.of_tower)  # one image each
    rows = ask_engine(tower, HeldOut([], [*own, last], "", last), [STATES]).rows[STATES]
    *read, canary = (encoding.with_features([row]) for encoding, row in zip(encodings, rows, strict=True))
    return replace(asked, encodings=read, canary=canary)


def _thresholds(job: Job, *, is_decoder: bool) -> Thresholds:
    least = job.config.min_cosine
    return thresholds_of(min_cosine_of(job.precision, is_decoder=is_decoder) if least is None else least)


def _expected(
    job: Job, images: ImageCheckpoint, files: Sequence[HeldOutImage], held_out: HeldOut, decoder: Job | None
) -> ReferenceAnswers:
    """The reference's vectors, of transformers where torch is, else of bei's own FP32 engines."""
    output = images.head
    wants_own = job.config.reference in ("engine", "module")
    if hf.is_available() and not wants_own and images.checkpoint.family.reference_class is not None:
        layers: list[ScoreLayer] = []
        if output == "logits" and decoder is not None:
            layers = [_score_layer(layer, decoder) for layer in decoder.checkpoint.spec.heads[0].layers]
        reference = HFImageReference(images, _merged_tensors(job, decoder), layers)
        rows: list[Float32Array] = reference.run([content for _, content in files])
        return ReferenceAnswers(reference.name, False, {output: rows})
    purpose = "The FP32 engine to verify images with"
    if decoder is not None:
        with open_fp32(job, purpose, {}) as (tower, _):
            held_out = _with_states(tower, held_out)
    with open_fp32(decoder or job, purpose, {}) as (engine, compiler):
        own = EngineReference(engine, f"{compiler} engine, FP32, one image at a time")
        return ReferenceAnswers(own.name, True, own.run(held_out.encodings, [output]))


def _score_layer(layer: HeadLayer, decoder: Job) -> ScoreLayer:
    assert isinstance(layer, DenseSpec), "such heads alone have images"
    bias = decoder.weights.read(f"{layer.name}.bias") if layer.bias else None
    return ScoreLayer(decoder.weights.read(f"{layer.name}.weight"), bias, layer.activation)


def _merged_tensors(job: Job, decoder: Job | None) -> dict[str, Float32Array] | None:
    """The checkpoint's tensors with the adapter that is merged into them; None: the files have them."""
    adapter = job.checkpoint.adapter
    if adapter is None or not adapter.changes_weights:
        return None
    return dict((decoder or job).weights.stored_tensors(of_all=True))


def _agreement(
    answers: EngineAnswers,
    files: Sequence[HeldOutImage],
    canary: list[float],
    reference: ReferenceAnswers | None = None,
    thresholds: Thresholds | None = None,
    output: Agreement | None = None,
) -> ImageAgreement:
    sha = hashlib.sha256()
    for _, content in files:
        sha.update(content)
    return ImageAgreement(
        kind="none" if reference is None else "self-consistency" if reference.is_own else "reference",
        reference="" if reference is None else reference.name,
        reference_is_independent=reference is not None and not reference.is_own,
        device=answers.device,
        num_images=answers.num_texts,
        images_sha256=sha.hexdigest(),
        thresholds=thresholds,
        passed=output is not None and not output.failures,
        canary_row=canary,
        output=output,
    )
