"""Gated short convolutions of layers, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvolutionSpec:
    """A gated convolution of each channel over neighbouring tokens, in the place of an attention (LFM2,
    arXiv:2511.23404, section 2.1).

    One linear layer gives b, c and x of the layer's width; the result is output(c * conv(b * x)). The convolution reads
    ``kernel_size`` tokens of its sequence: the last one is the token itself if ``causal``, else it is the one in the
    middle. There are zeros beyond a sequence's ends. ``bias``: of the two linear layers and the convolution.
    ``drops_unattended``: tokens that are not attention keys (``ModelSpec.partial_keys``) have zeros as inputs.
    """

    kernel_size: int
    causal: bool
    bias: bool = False
    drops_unattended: bool = False

    @property
    def offsets(self) -> range:
        """Places of the tokens that are read, relative to the token itself, in the order of the kernel."""
        first = 1 - self.kernel_size if self.causal else -(self.kernel_size // 2)
        return range(first, first + self.kernel_size)
