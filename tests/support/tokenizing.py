"""The tokenizer that a checkpoint's artifact gets, and how it compares with the library's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.certificate.record import TokenAgreement
from bei.artifact.store import sha256_of_file
from bei_build.reference.held_out import held_out_texts
from bei_build.reference.retrieval_set import bundled_set
from bei_build.tokenizer.artifact_tokenizer import artifact_tokenizer
from bei_build.tokenizer.library_tokenizer import (
    TokenizerSettings,
    check_model,
    open_tokenizer,
    stored_tokenizer,
    tokenization_of,
)
from bei_build.tokenizer.token_comparison import TokenSources, compare_tokens, make_probes, reading_difference

LONGEST = 512


def tokenizer_of(folder: Path, **reading: Any) -> Tokenizer:
    """As a build makes it of ``folder``; ``reading``: fields of TokenizerReading."""
    asked = TokenizerSettings(**reading)
    return artifact_tokenizer(open_tokenizer(folder, asked), asked, folder)


def compared_with_library(folder: Path, scratch: Path, **reading: Any) -> tuple[TokenAgreement, str | None]:
    """What a build compares for a model without token types, and whether it would note another reading of the file."""
    asked, artifact = TokenizerSettings(**reading), scratch / "tokenizer.json"
    library = open_tokenizer(folder, asked)
    check_model(stored_tokenizer(folder), library, asked)
    artifact_tokenizer(library, asked, folder).save(str(artifact))
    sources = TokenSources.open(folder, asked, artifact, tokenization_of(library), LONGEST, 1 << 30, types_matter=False)
    known = bundled_set()
    probes = make_probes(sources, [*held_out_texts(), *known.queries, *known.documents], (), LONGEST)
    agreement = compare_tokens(sources, probes, LONGEST, sha256_of_file(artifact))
    return agreement, reading_difference(folder, asked, sources, probes, LONGEST)
