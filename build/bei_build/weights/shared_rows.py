"""Static embeddings whose tokens share rows: model2vec's models with a quantized vocabulary.

Their table has few rows. The tensor ``mapping`` gives the row of each token, ``weights`` the factor of its row; either
may be missing (model2vec 0.10.0, ``StaticModel._encode_helper``). A table of int8 has no scale.

The table of all tokens is expanded here, at build time. It is as large as the model was before its vocabulary was
quantized; a second lookup would save that memory, and need another operation in every target.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.weights.tensor_store import TensorStore, WrappedStore

_MAPPING, _WEIGHTS = "mapping", "weights"


class SharedRowsStore(WrappedStore):
    """The tensors of ``store`` with its table of rows, called ``table``, expanded to all tokens.

    Raises WeightsError where the three tensors do not belong together.
    """

    def __init__(self, store: TensorStore, table: str) -> None:
        super().__init__(store)
        self._table = table
        stored = store.shapes
        self._shapes = {name: shape for name, shape in stored.items() if name not in (_MAPPING, _WEIGHTS)}
        self._mapping = _row_indices(store, stored, table) if _MAPPING in stored else None
        self._has_weights = _WEIGHTS in stored
        if len(shape := stored.get(table, ())) != 2:
            return  # the code that reads the table reports its missing or wrong shape
        tokens = shape[0] if self._mapping is None else len(self._mapping)
        self._shapes[table] = (tokens, shape[1])
        if self._has_weights and stored[_WEIGHTS] != (tokens,):
            raise WeightsError(
                f"Tensor {_WEIGHTS} has shape {list(stored[_WEIGHTS])} for {tokens} tokens. Download the checkpoint "
                "again."
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return self._shapes

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        if name != self._table:
            return self._store.read(name)
        is_int8 = self._store.type_of(name) in ("I8", "torch.int8")
        rows = self._store.read_integers(name).astype(np.float32) if is_int8 else self._store.read(name)
        if self._mapping is not None:
            rows = rows[self._mapping]
        return rows * self._store.read(_WEIGHTS)[:, None] if self._has_weights else rows

    def _is_changed(self, name: str) -> bool:
        return name == self._table


def _row_indices(store: TensorStore, stored: Mapping[str, tuple[int, ...]], table: str) -> npt.NDArray[np.int64]:
    """The row of each token. Raises WeightsError where the table has no such rows."""
    mapping, num_rows = store.read_integers(_MAPPING), stored.get(table, (0,))[0]
    if mapping.ndim != 1 or not len(mapping) or mapping.min() < 0 or mapping.max() >= num_rows:
        raise WeightsError(
            f"Tensor {_MAPPING} does not say for each token which of the {num_rows} rows of {table} it has. Download "
            "the checkpoint again."
        )
    return mapping
