"""The image tower of a checkpoint: its spec, read beside the text tower's from one folder, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bei.artifact.image_processor import ImageProcessor
from bei.artifact.image_sequence import ImageSequence
from bei.artifact.manifest import EngineRequirements, ImageTower, RerankTemplate, SpecSummary, Tokenization
from bei.core import Limits
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnsupportedArchitectureError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.decoder_processor import image_sequence
from bei_build.checkpoint.image_processor import has_image_processor, read_image_processor
from bei_build.checkpoint.locate import Location, check_entries
from bei_build.checkpoint.remote_code import check_remote_code
from bei_build.checkpoint.sentence_transformers import read_sentence_transformers
from bei_build.families import table
from bei_build.families.base import Family
from bei_build.families.vision import VisionFamily
from bei_build.files.json_settings import read_object
from bei_build.files.size_limits import check_sizes
from bei_build.spec.model_spec import ModelSpec, Output
from bei_build.spec.parts import EmbeddingsSpec, LayerSpec
from bei_build.spec.patches import PatchesSpec
from bei_build.tokenizer.library_tokenizer import TokenizerSettings
from bei_build.weights.tensor_store import check_weights

# Height and width of the canary of a tower that reads images of nearly any size: one that a step has in a moment.
_CANARY = (224, 224)


@dataclass(frozen=True)
class ImageCheckpoint:
    """``checkpoint``: spec, config and family of the tower, whose tokenizer is the text tower's, or an empty one.
    ``averages``: an image's vector is the mean of the states of a decoder's tokens; else it is of one of them.
    ``output``: of the reference class, the vectors of images. ``sequence``: how the checkpoint's decoder reads an
    image; None: its vector is the tower's. ``head``: the output of the model that images have. ``has_processor`` and
    ``counts_as_text`` as in ``VisionFamily``."""

    checkpoint: Checkpoint
    processor: ImageProcessor
    image_size: tuple[int, int]
    output: str
    sequence: ImageSequence | None = None
    head: Output = "embedding"
    has_processor: bool = True
    counts_as_text: bool = False
    averages: bool = False

    @property
    def patches(self) -> PatchesSpec:
        """Of its embeddings."""
        patches = self.checkpoint.spec.embeddings.patches
        assert patches is not None, "only such checkpoints are made"
        return patches

    def tower(self, needs: EngineRequirements, limits: Limits) -> ImageTower:
        """What the manifest says of it."""
        spec = self.checkpoint.spec
        return ImageTower(
            processor=self.processor,
            image_size=self.image_size,
            patch_size=self.patches.size,
            class_token=self.patches.class_token,
            registers=self.patches.registers or msgspec.UNSET,
            pooling="none" if self.sequence else spec.heads[0].pooling[0],
            sequence=self.sequence or msgspec.UNSET,
            spec=SpecSummary(
                family=spec.family,
                architecture=spec.architecture,
                num_layers=len(spec.layers),
                hidden_size=spec.hidden_size,
                num_heads=spec.attentions[0].num_heads,
                vocab_size=1,  # its tokens have no other id than 0
                num_parameters=spec.num_parameters,
                attention="bidirectional",
                attention_asked=False,
            ),
            engine=needs,
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
        )


def has_image_tower(checkpoint: Checkpoint) -> bool:
    """True if the checkpoint's class has two towers, and the checkpoint both."""
    vision = table.vision_family(checkpoint.spec.architecture)
    return vision is not None and (checkpoint.spec.embeddings.reads_images or not vision.is_read_by_decoder)


def without_images(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` for texts alone: no images stand among its tokens."""
    embeddings = replace(checkpoint.spec.embeddings, reads_images=False, image_layers=0)
    return replace(checkpoint, spec=replace(checkpoint.spec, embeddings=embeddings))


def reads_images_alone(location: Location) -> bool:
    """True if the checkpoint's class has an image tower and no other. False for a folder that is no such checkpoint,
    whatever else it may be. Raises CheckpointError for files that cannot be read."""
    path = location.folder / "config.json"
    check_entries(location.folder)  # a pipe of that name would block
    return path.is_file() and table.reads_images_alone(_architecture(read_object(path)) or "")


def read_image_tower(
    checkpoint: Checkpoint, max_pixels: int | None = None, template: RerankTemplate | None = None
) -> ImageCheckpoint | None:
    """The image tower beside the text tower of ``checkpoint``; None where its folder has no image processor's
    settings. ``max_pixels``: of an image, fewer than those say. ``template``: of a reranker's pairs. Raises
    CheckpointError, ConfigError.
    """
    architecture, folder = checkpoint.spec.architecture, checkpoint.folder
    vision = table.vision_family(architecture)
    if vision is None or not has_image_processor(folder):
        return None
    _check_processing(folder)
    raw = read_object(folder / "config.json")
    vision = vision.read_by(raw)
    if checkpoint.files.chat:
        vision = replace(vision, usual_blocks=None)
    read = _tower(folder, architecture, vision, max_pixels)
    spec, sequence = read.spec, None
    embedding = checkpoint.spec.head("embedding")
    if vision.is_read_by_decoder:
        assert spec.embeddings.patches is not None, "families of images have them"
        sequence = image_sequence(checkpoint, spec.embeddings.patches, read.max_tokens, template)
    elif embedding is None or embedding.dimension(checkpoint.spec.hidden_size) != spec.dimensions["embedding"]:
        raise CheckpointError(
            f"{folder / 'config.json'} gives vectors of images another width than those of texts. Download "
            "the checkpoint again."
        )
    tower = replace(
        checkpoint,
        family=vision.family,
        spec=spec,
        config=_reference_config(vision, raw, read.config if sequence is None else checkpoint.config),
        max_seq_len=read.max_tokens,
        modules={},
    )
    head = "embedding" if sequence is None else checkpoint.spec.heads[0].output
    return ImageCheckpoint(
        tower,
        read.processor,
        read.image_size,
        vision.output,
        sequence,
        head,
        vision.has_processor,
        vision.counts_as_text,
        averages=sequence is not None and checkpoint.spec.heads[0].pooling == ("mean",),
    )


def _check_processing(folder: Path) -> None:
    """Raise CheckpointError where sentence-transformers' files have settings of images that the processor's do not."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        found = read_object(path).get("processing_kwargs")
        if isinstance(found, dict) and (asked := found.get("image")):
            raise CheckpointError(
                f"{path} has processing_kwargs with image = {str(asked)[:80]}, which bei does not read: put it into "
                "the image processor's file, or build for texts alone (--no-images)."
            )


def _reference_config(vision: VisionFamily, raw: Mapping[str, Any], otherwise: Any) -> Any:
    """The config of the class that is the tower's reference."""
    if vision.whole is None:
        return otherwise
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(vision.whole(raw)))
    config.return_dict = True
    return config


def read_images_alone(location: Location) -> ImageCheckpoint:
    """The image tower of the checkpoint at ``location``, whose texts, if it reads any, are left out.

    Raises CheckpointError and its subclasses; ConfigError where it has no image tower.
    """
    if location.gguf is not None:
        raise ConfigError(f"{location.model} is a GGUF file, which has no image tower: leave --no-texts out.")
    check_entries(location.folder)
    files = read_sentence_transformers(location.folder)
    folder = files.transformer_folder
    check_weights(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointNotFoundError(f"{folder} has no config.json: it is not a Hugging Face checkpoint.")
    raw = read_object(path)
    check_sizes(path, raw)
    architecture = _architecture(raw)
    if architecture is None or (vision := table.vision_family(architecture)) is None:
        raise ConfigError(f"{architecture or location.model} has no image tower: leave --no-texts out.")
    if vision.is_read_by_decoder:
        raise ConfigError(f"{architecture} has no vectors of images without its decoder: leave --no-texts out.")
    if (location.folder / "modules.json").is_file():
        raise CheckpointError(
            "modules.json asks for a pooling and layers of sentence-transformers behind the image tower, and bei "
            "builds image towers as their own classes have them. Such models are not supported."
        )
    check_remote_code(raw, vision.family, architecture, None)
    if raw.get("quantization_config"):
        raise CheckpointError(f"{path}: the checkpoint is quantized. Build from the original 16- or 32-bit one.")
    if not has_image_processor(folder):
        raise CheckpointError(
            f"{folder} has no preprocessor_config.json, which says how images are read. Download the checkpoint again."
        )
    read = _tower(folder, architecture, vision)
    checkpoint = Checkpoint(
        location,
        files,
        vision.family,
        read.spec,
        tokenizer=Tokenizer(WordLevel({}, "")),
        tokenizer_settings=TokenizerSettings(),
        tokenization=Tokenization(library="none", tokenizer_class="none"),
        rowless=(),
        max_seq_len=read.max_tokens,
        labels=None,
        modules={},
        config=read.config,
        roles={},
        adapter=None,
    )
    return ImageCheckpoint(checkpoint, read.processor, read.image_size, vision.output)


class _Tower(NamedTuple):
    """What the files of an image tower say: ``image_size`` of its images, of the canary where they have many, and the
    most tokens of one."""

    config: Any
    spec: ModelSpec
    processor: ImageProcessor
    image_size: tuple[int, int]
    max_tokens: int


def _tower(folder: Path, architecture: str, vision: VisionFamily, max_pixels: int | None = None) -> _Tower:
    """The image tower in ``folder``, which has an image processor. Raises CheckpointError."""
    family, path = vision.family, folder / "config.json"
    raw = read_object(path)
    config, spec = _read(path, family.translate(raw) if family.translate else raw, family, architecture)
    patches = spec.embeddings.patches
    assert patches is not None, "families of images have them"
    count = spec.embeddings.max_positions if vision.is_read_by_decoder else None
    processor = read_image_processor(
        folder, patches.size, count, vision.usual_blocks, max_pixels, has_own_blocks=vision.has_own_blocks
    )
    assert processor is not None, "the caller has asked"
    config.return_dict, config.chunk_size_feed_forward = True, 0
    most = processor.most_patches(patches.size)
    if bool(most) != patches.fits_images:
        raise CheckpointError(
            f"{folder / 'preprocessor_config.json'} is of images of {'many sizes' if most else 'one size'}, and "
            f"{architecture} reads others. Download the checkpoint again."
        )
    _check_blocks(path, processor, spec.embeddings, most)
    if most:
        side = isqrt(most) * patches.size
        canary = processor.by_pixels.size(*_CANARY) if processor.by_pixels else (side, side)
        patches = patches.behind(processor.scales, processor.shifts)
        spec = replace(spec, embeddings=replace(spec.embeddings, patches=patches))
        return _Tower(config, spec, processor, canary, most)
    size = processor.output_size
    if not vision.resizes_positions or size is None:
        if size not in (None, (config.image_size, config.image_size)):
            raise CheckpointError(
                f"The image processor makes images of {size}, and {path} says image_size = {config.image_size}: "
                "transformers refuses such images. Correct preprocessor_config.json."
            )
        size = (config.image_size, config.image_size)
    spec, count = _with_images(spec, processor, size)
    return _Tower(config, spec, processor, size, count)


def _check_blocks(path: Path, processor: ImageProcessor, spec: EmbeddingsSpec, most: int | None) -> None:
    """Raise CheckpointError unless images of up to ``most`` patches are whole blocks, for whose patches ``spec`` has
    positions."""
    patches = spec.patches
    assert patches is not None, "families of images have them"
    if (resized := processor.by_pixels) and resized.multiple != patches.size * patches.block_side:
        raise CheckpointError(
            f"The image processor makes sides of multiples of {resized.multiple} pixels, and {path} has blocks of "
            f"{patches.block_side} patches of {patches.size} pixels (pooling_kernel_size). Download the checkpoint "
            "again."
        )
    longest = (most or 0) // patches.block_side
    if patches.axial and longest > spec.max_positions:
        raise CheckpointError(
            f"{path} has position_embedding_size = {spec.max_positions}, and images have up to {longest} patches a "
            "side. Download the checkpoint again."
        )


def _read(path: Path, raw: Mapping[str, Any], family: Family, architecture: str) -> tuple[Any, ModelSpec]:
    """The config and spec of the tower that ``raw`` describes. Raises CheckpointError."""
    check_sizes(path, raw)
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    try:
        is_known = family.model_type in CONFIG_MAPPING  # remote code is not
        config_class = CONFIG_MAPPING[family.model_type] if is_known else PreTrainedConfig
        config = config_class.from_dict({**raw, "model_type": family.model_type})
        return config, family.spec_from_config(config, architecture)
    except CheckpointError:
        raise
    except Exception as error:  # transformers validates with several exception types
        reason = " ".join(str(error).split())[:1000]
        raise CheckpointError(f"{path} describes no image tower ({reason}). Download the checkpoint again.") from error


def _with_images(spec: ModelSpec, processor: ImageProcessor, size: tuple[int, int]) -> tuple[ModelSpec, int]:
    """``spec`` for the images of ``size`` (height, width) that ``processor`` makes, and the tokens of each. Raises
    UnsupportedArchitectureError."""
    patches = spec.embeddings.patches
    assert patches is not None, "families of images have them"
    if any(side % patches.size for side in size):
        raise UnsupportedArchitectureError(
            f"The image processor makes images of {size[0]} x {size[1]} pixels, which patches of {patches.size} do not "
            "fill: the model's own code would cut off the rest. Such models are not supported."
        )
    grid = (size[0] // patches.size, size[1] // patches.size)
    patches = replace(patches.behind(processor.scales, processor.shifts), grid=grid)
    count = patches.num_leading + grid[0] * grid[1]
    rows = count if spec.embeddings.max_positions else 0
    embeddings = replace(spec.embeddings, patches=patches, max_positions=rows)
    return replace(spec, embeddings=embeddings, layers=tuple(_turned(layer, grid) for layer in spec.layers)), count


def _turned(layer: LayerSpec, grid: tuple[int, int]) -> LayerSpec:
    """``layer`` for images of ``grid`` patches, whose rotations are by their places in it."""
    rope = layer.attention.rope if layer.attention else None
    if rope is None or not rope.centred:
        return layer
    return layer.with_attention(rope=replace(rope, grid=grid))


def _architecture(raw: Mapping[str, Any]) -> str | None:
    architectures = raw.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and architectures else None
    return found if isinstance(found, str) else None
