"""The Hugging Face implementation of an image tower in FP32: its image processor and its class, one file at a time.

It shares no code with the engine's way from a file to a vector but Pillow's decoders.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Sequence
from typing import Any

from bei.core import Float32Array
from bei.errors import VerificationError
from bei.utils.libraries import importing
from bei_build import memory
from bei_build.checkpoint.image_tower import ImageCheckpoint
from bei_build.reference.hf_model import load_model


class HFImageReference:
    """Raises VerificationError where memory does not suffice, or transformers does not load the checkpoint."""

    name = "transformers, FP32, its image processor on Pillow, one image at a time"

    def __init__(self, images: ImageCheckpoint) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in HFReference
        with importing("torch", "cuda", "Verifying with transformers' model", remedy="install its CPU build"):
            import torch
        from transformers import AutoImageProcessor
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._torch = torch
        memory.require(4 * images.checkpoint.spec.num_parameters, "The reference, a copy of the image tower in FP32,")
        self._output = images.output
        self._model: Any = load_model(images.checkpoint, "eager", torch.float32)
        try:
            # Later versions of transformers 5 have the word "backend".
            source = inspect.getsource(AutoImageProcessor.from_pretrained)
            pillow: dict[str, Any] = {"backend": "pil"} if '"backend"' in source else {"use_fast": False}
            processors: Any = AutoImageProcessor
            self._processor = processors.from_pretrained(images.checkpoint.folder, **pillow)
        except Exception as error:  # transformers raises ValueError, OSError, ImportError and its own
            reason = next(iter(str(error).splitlines()), "")
            raise VerificationError(f"transformers does not load the image processor ({reason}).") from error

    def run(self, files: Sequence[bytes]) -> list[Float32Array]:
        """The vector of each file, float32 [width]."""
        rows = []
        with self._torch.inference_mode():
            for content in files:
                found = getattr(self._model(**self.inputs(content)), self._output)[0]
                rows.append((found if found.ndim == 1 else found[0]).numpy())
        return rows

    def inputs(self, content: bytes) -> Any:
        """What the image processor makes of a file for the model: ``pixel_values``, a float32 tensor [1, 3, height,
        width], or the class's own."""
        from PIL import Image, ImageOps

        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        # Some processors leave modes other than RGB as they are, which their models refuse.
        return self._processor(images=image, do_convert_rgb=True, return_tensors="pt")
