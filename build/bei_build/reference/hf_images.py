"""The Hugging Face implementation of an image tower in FP32: its image processor and its class, one file at a time.

It shares no code with the engine's way from a file to a vector but Pillow's decoders.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bei.artifact.image_processor import ImageProcessor
from bei.artifact.image_sequence import ImageSequence
from bei.core import Float32Array
from bei.errors import VerificationError
from bei.utils.libraries import importing
from bei_build import memory
from bei_build.checkpoint.image_tower import ImageCheckpoint
from bei_build.reference.hf_model import load_model
from bei_build.spec.parts import Activation

if TYPE_CHECKING:
    from PIL.Image import Image


class ScoreLayer(NamedTuple):
    """A linear layer on a state: ``weight`` [out, in], ``bias`` [out], and what follows."""

    weight: Float32Array
    bias: Float32Array | None
    activation: Activation


class HFImageReference:
    """``tensors``, by the checkpoint's names, replace the content of its files. ``score``: the layers of a reranker on
    its states. Raises VerificationError where memory does not suffice, or transformers does not load
    the checkpoint."""

    name = "transformers, FP32, its image processor on Pillow, one image at a time"

    def __init__(
        self,
        images: ImageCheckpoint,
        tensors: Mapping[str, Float32Array] | None = None,
        score: Sequence[ScoreLayer] = (),
    ) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in HFReference
        with importing("torch", "cuda", "Verifying with transformers' model", remedy="install its CPU build"):
            import torch
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._torch, self._score = torch, score
        memory.require(4 * images.checkpoint.spec.num_parameters, "The reference, a copy of the image tower in FP32,")
        self._output, self._counts_as_text = images.output, images.counts_as_text
        own = None if tensors is None else {name: torch.from_numpy(values) for name, values in tensors.items()}
        self._model: Any = load_model(images.checkpoint, "eager", torch.float32, own)
        self._processor: Any
        if images.processor.fractions:  # transformers has it for torchvision alone
            self.name = "transformers, FP32, on pixels of its image processor's steps in torch, one image at a time"
            self._processor = FractionsInTorch(images.processor)
        elif images.sequence is not None and not images.has_processor:
            self._processor = ImagesInChat(images.checkpoint.folder, images.sequence, images.processor)
        elif images.sequence is not None:
            self._processor = _ImagesInText(images.checkpoint.folder, images.processor)
        else:
            self._processor = _on_pillow(images.checkpoint.folder)
        # Of states the first token's, where a tower gives them; a decoder's last one has seen all.
        self._row = slice(None) if images.head == "token_embedding" else 0 if images.sequence is None else -1
        self._averages = images.averages

    def run(self, files: Sequence[bytes]) -> list[Float32Array]:
        """The vector of each file, float32 [width], or those of its tokens, [tokens, width]."""
        rows = []
        with self._torch.inference_mode():
            for content in files:
                found = getattr(self._model(**self._with_positions(self.inputs(content))), self._output)[0]
                found = found.mean(0) if self._averages else found
                row: Float32Array = (found if found.ndim == 1 else found[self._row]).numpy()
                for layer in self._score:
                    assert layer.activation in ("identity", "relu"), "such heads alone have images"
                    row = layer.weight @ row + (0.0 if layer.bias is None else layer.bias)
                    row = np.maximum(row, 0.0) if layer.activation == "relu" else row
                rows.append(row)
        return rows

    def _with_positions(self, inputs: Any) -> Any:
        """``inputs`` with the positions on three axes that the class's own language model counts, where it does:
        ColQwen2's class of transformers 5 passes none on, unlike that of 4. Or with those of a text, for models that
        count so."""
        if self._counts_as_text:
            return {**inputs, "position_ids": self._torch.arange(inputs["input_ids"].shape[1]).expand(3, 1, -1)}
        count = getattr(getattr(self._model, "vlm", None), "get_rope_index", None)
        if count is None:
            return inputs
        ids, token = inputs["input_ids"], self._model.config.vlm_config.image_token_id
        grids, mask = inputs["image_grid_thw"], inputs["attention_mask"]
        positions, _ = count(ids, mm_token_type_ids=(ids == token).int(), image_grid_thw=grids, attention_mask=mask)
        pixels = inputs["pixel_values"]  # which the class's own processor gives as one row an image
        return {**inputs, "position_ids": positions, "pixel_values": pixels if pixels.ndim == 3 else pixels[None]}

    def inputs(self, content: bytes) -> Any:
        """What the image processor makes of a file for the model: ``pixel_values``, a float32 tensor [1, 3, height,
        width], or the class's own."""
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        # Some processors leave modes other than RGB as they are, which their models refuse.
        return self._processor(images=image, do_convert_rgb=True, return_tensors="pt")


def _on_pillow(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    try:
        # Later versions of transformers 5 have the word "backend".
        source = inspect.getsource(AutoImageProcessor.from_pretrained)
        pillow: dict[str, Any] = {"backend": "pil"} if '"backend"' in source else {"use_fast": False}
        processors: Any = AutoImageProcessor
        return processors.from_pretrained(folder, **pillow)
    except Exception as error:  # transformers raises ValueError, OSError, ImportError and its own
        reason = next(iter(str(error).splitlines()), "")
        raise VerificationError(f"transformers does not load the image processor ({reason}).") from error


def _bound(processor: Any, own: ImageProcessor) -> None:
    """Give an image processor of transformers the numbers of pixels of ``own``: a user, or the model's own code, may
    have other ones than the files."""
    if bounds := own.bounds:
        processor.size = {"shortest_edge": bounds.fewest, "longest_edge": bounds.most}
    if budget := own.budget:
        processor.max_soft_tokens = budget.most_multiples


class _ImagesInText:
    """The processor of a class that reads images among tokens."""

    def __init__(self, folder: Path, own: ImageProcessor) -> None:
        from transformers import AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
        except Exception as error:  # transformers raises ValueError, OSError, ImportError and its own
            reason = next(iter(str(error).splitlines()), "")
            raise VerificationError(f"transformers does not load the processor ({reason}).") from error
        self._processor.image_processor = _on_pillow(folder)
        _bound(self._processor.image_processor, own)

    def __call__(self, images: Image, **settings: Any) -> dict[str, Any]:
        """An image's inputs, without the labels of training."""
        found = self._processor(images=images, **settings)
        return {name: value for name, value in found.items() if name != "labels"}


class ImagesInChat:
    """The image processor of a class that reads images among tokens, and the ids of ``sequence`` around an image: its
    own processor cannot be made without a library for films."""

    def __init__(self, folder: Path, sequence: ImageSequence, own: ImageProcessor) -> None:
        self._images = _on_pillow(folder)
        _bound(self._images, own)
        self._sequence = sequence

    def __call__(self, images: Image, **settings: Any) -> dict[str, Any]:
        """An image's inputs."""
        import torch

        found, sequence = dict(self._images(images=images, **settings)), self._sequence
        counts, grid = found.pop("num_soft_tokens_per_image", None), found.get("image_grid_thw")
        count = int(counts[0]) if grid is None else int(grid.prod()) // self._images.merge_size**2
        ids = torch.tensor([[*sequence.before, *[sequence.token_id] * count, *sequence.after]])
        inputs = {**found, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs if grid is None else {**inputs, "mm_token_type_ids": (ids == sequence.token_id).int()}


class FractionsInTorch:
    """The steps of an image processor that rescales before it resizes, as torchvision calls torch for them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor

    def __call__(self, images: Image, do_convert_rgb: bool, return_tensors: str) -> dict[str, Any]:
        """``pixel_values`` of an image, float32 [1, 3, height, width]."""
        import torch
        from transformers.image_transforms import convert_to_rgb

        processor = self._processor
        levels = torch.from_numpy(np.array(convert_to_rgb(images))).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            levels * processor.rescale, processor.resize, mode=processor.resample, align_corners=False, antialias=True
        )
        mean, std = (torch.tensor(of).view(3, 1, 1) for of in (processor.mean, processor.std))
        return {"pixel_values": (resized - mean) / std}
