"""What a service needs to read images: how they become encodings, and what their tower's steps cost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

from bei.artifact.certificate.canary import canary_levels
from bei.artifact.manifest import Artifact, Manifest
from bei.config.settings import ServeConfig
from bei.errors import InvalidImageError, InvalidRequestError
from bei.image.decode import ImageLimits, check_able
from bei.image.encoder import ImageEncoder
from bei.image.fetch import ImageFetcher
from bei.image.source import ImageInput
from bei.scheduler.cost_model import CostModel
from bei.scheduler.image_bounds import ImageReading
from bei.service.admission import NO_DEMAND, Demand
from bei.service.decoding_turns import DecodingTurns
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.pieces import PieceEncoder

# Of a request: one takes 10 to 40 us, in which the event loop waits, and a body of 8 MB has tens of thousands.
_MOST_HEADERS = 1_000


@dataclass(frozen=True)
class ImageSide:
    """``costs``: of steps of the image tower's engine. ``image_size``: height and width of what it reads.
    ``decoder_costs``: of steps of the engine that reads its states, with ``width`` numbers for each of the tower's
    tokens; None: no decoder does. ``turns``: of threads that decode images, beside the engines of this process."""

    encoder: ImageEncoder
    costs: CostModel
    image_size: tuple[int, int]
    decoder_costs: CostModel | None = None
    width: int = 0
    turns: DecodingTurns = field(default_factory=DecodingTurns)

    @property
    def reading(self) -> ImageReading | None:
        """How a decoder reads the images; None: none does."""
        return None if self.decoder_costs is None else ImageReading(self.width, self.costs, self.decoder_costs)

    def demand(self, images: Seq[ImageInput]) -> Demand:
        """Of ``images``, by the sizes in their headers; of one that is there many times the header is read once, and of
        very many images the headers of some, which are drawn by chance, stand for all."""
        demand = NO_DEMAND
        times = Counter(map(id, images))
        different = {id(image): image for image in images}
        if len(different) > _MOST_HEADERS:
            different = dict(random.sample([*different.items()], _MOST_HEADERS))
        sizes = Counter[int]()
        for key, image in different.items():
            sizes[self.encoder.num_states(image)] += times[key]
        num_read = sum(sizes.values())
        for num_states, times_read in sizes.items():
            count = round(times_read * len(images) / num_read)
            num_tokens = self.encoder.num_tokens(num_states)
            seconds = self.costs.sequence_seconds(num_states)
            if self.decoder_costs is not None:
                seconds += self.decoder_costs.sequence_seconds(num_tokens)
            demand = demand.plus(Demand(count * num_tokens, count * seconds, num_tokens))
        return demand

    @cached_property
    def canary(self) -> ImageInput:
        """The image that readiness asks for."""
        from PIL import Image

        return ImageInput(Image.fromarray(canary_levels(*self.image_size)))


def check_reads_images(manifest: Manifest) -> None:
    """Where the model reads images, require what that takes. Raises MissingDependencyError."""
    if manifest.image_tower is not None:
        check_able(f"Serving {manifest.name}, which reads images,")


def image_side_of(
    artifact: Artifact,
    config: ServeConfig,
    costs: CostModel,
    text_costs: CostModel | None = None,
    texts: TextEncoder | None = None,
) -> ImageSide:
    """Of an artifact with an image tower, whose steps cost ``costs``; ``text_costs``: of the engine of texts, which
    ``texts`` is the encoder of. Raises MissingDependencyError without Pillow."""
    check_reads_images(artifact.manifest)
    tower = artifact.manifest.image_tower
    assert tower is not None, "the caller has asked"
    max_bytes = config.image_megabytes * 1_000_000
    fetcher = None
    if config.image_url_hosts:
        fetcher = ImageFetcher(config.image_url_hosts, max_bytes, config.image_url_seconds)
    limits = ImageLimits(max_bytes, config.image_megapixels * 1_000_000, fetcher)
    encoder = ImageEncoder(
        tower.processor,
        tower.image_size,
        tower.patch_size,
        num_leading=tower.num_leading,
        limits=limits,
        sequence=tower.sequence or None,
        texts=None if texts is None else PieceEncoder(texts, artifact.manifest.max_seq_len),
    )
    if not tower.sequence:
        return ImageSide(encoder, costs, tower.image_size)
    return ImageSide(encoder, costs, tower.image_size, text_costs, tower.sequence.row_width)


def no_images(name: str, param: str) -> InvalidImageError:
    """The error of an image for a model that reads texts only."""
    return InvalidImageError(f"{name} reads no images: send texts, or ask a model that has an image tower.", param)


def no_texts(name: str, param: str) -> InvalidRequestError:
    """The error of a text, or of token ids, for a model that reads images only."""
    return InvalidRequestError(f"{name} reads no texts: send images, or ask a model that has a text tower.", param)
