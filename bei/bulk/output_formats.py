"""The output formats, by their names."""

from __future__ import annotations

from collections.abc import Mapping

from bei.bulk.lance_parts import LanceParts
from bei.bulk.parts import JsonLinesParts, NpyParts, ParquetParts, PartFormat

FORMATS: Mapping[str, type[PartFormat]] = {
    "parquet": ParquetParts,
    "jsonl": JsonLinesParts,
    "npy": NpyParts,
    "lance": LanceParts,
}
