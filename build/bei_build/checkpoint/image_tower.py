"""The image tower of a checkpoint that has two: its spec, read from the same folder as the text tower's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bei.artifact.image_processor import ImageProcessor
from bei.artifact.manifest import EngineRequirements, ImageTower, SpecSummary
from bei.core import Limits
from bei.errors import CheckpointError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.image_processor import read_image_processor
from bei_build.families.table import vision_family
from bei_build.files.json_settings import read_object
from bei_build.files.size_limits import check_sizes
from bei_build.spec.parts import PatchesSpec


@dataclass(frozen=True)
class ImageCheckpoint:
    """``checkpoint``: spec, config and family of the tower, whose tokenizer is the text tower's. ``output``: of the
    reference class, the vectors of images."""

    checkpoint: Checkpoint
    processor: ImageProcessor
    image_size: tuple[int, int]
    output: str

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
            pooling=spec.heads[0].pooling[0],
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
    """True if the checkpoint's class has two towers."""
    return vision_family(checkpoint.spec.architecture) is not None


def read_image_tower(checkpoint: Checkpoint) -> ImageCheckpoint | None:
    """The image tower beside the text tower of ``checkpoint``; None where its folder has no image processor's
    settings. Raises CheckpointError.
    """
    vision, processor = vision_family(checkpoint.spec.architecture), read_image_processor(checkpoint.folder)
    if vision is None or processor is None:
        return None
    family, path = vision.family, checkpoint.folder / "config.json"
    assert family.translate is not None, "the part of the whole config"
    raw = family.translate(read_object(path))
    check_sizes(path, raw)
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[family.model_type].from_dict({**raw, "model_type": family.model_type})
        spec = family.spec_from_config(config, checkpoint.spec.architecture)
        side = int(config.image_size)
    except CheckpointError:
        raise
    except Exception as error:  # transformers validates with several exception types
        reason = " ".join(str(error).split())[:1000]
        raise CheckpointError(f"{path} describes no image tower ({reason}). Download the checkpoint again.") from error
    embedding = checkpoint.spec.head("embedding")
    if embedding is None or embedding.dimension(checkpoint.spec.hidden_size) != spec.dimensions["embedding"]:
        raise CheckpointError(
            f"{path} gives vectors of images another width than those of texts. Download the checkpoint again."
        )
    if processor.output_size not in (None, (side, side)):
        raise CheckpointError(
            f"The image processor makes images of {processor.output_size}, and {path} says image_size = {side}: "
            "transformers refuses such images. Correct preprocessor_config.json."
        )
    patches = spec.embeddings.patches
    assert patches is not None, "families of images have them"
    patches = replace(patches, scales=processor.scales, shifts=processor.shifts)
    spec = replace(spec, embeddings=replace(spec.embeddings, patches=patches))
    config.return_dict, config.chunk_size_feed_forward = True, 0
    tower = replace(
        checkpoint, family=family, spec=spec, config=config, max_seq_len=spec.embeddings.max_positions, modules={}
    )
    return ImageCheckpoint(tower, processor, (side, side), vision.output)
