"""The tasks of a job: rows of the input to columns of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from bei.bulk.row_images import row_input
from bei.bulk.shard_service import ShardService
from bei.core import Float32Array
from bei.errors import BeiError, ConfigError, InvalidRequestError, MalformedRequestError
from bei.offline import extraction, methods
from bei.offline.input_checks import text
from bei.offline.method import Method, Vectors, WindowResult
from bei.offline.options import ExtractOptions, RerankOptions, checked
from bei.offline.results import Extracted, Predictions, SparseVector
from bei.service.admission import Ticket
from bei.service.call import ModelInput
from bei.tasks import rerank
from bei.tasks.extract_labels import extraction_of
from bei.tasks.rerank import RerankTask
from bei.tasks.schema_classes import LabelScore
from bei.tasks.schema_forms import first_instances
from bei.tasks.schema_spans import Value
from bei.tasks.support import require
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.label_prompt import LabelPrompt
from bei.tokenizer.truncation import encoding_options

if TYPE_CHECKING:
    import pyarrow as pa


class Outcome(NamedTuple):
    """Columns with a value for each input, of no meaning where it has an error. ``truncated`` and the keys of
    ``errors`` are places of inputs."""

    columns: Mapping[str, pa.Array]
    num_tokens: int
    truncated: Seq[int]
    errors: Mapping[int, BeiError]


class RowTask(NamedTuple):
    """``check`` takes a row's value and its place, and raises BeiError; ``run`` gets inputs, and errors of those that
    are not to be run. ``stand_in`` takes the place of these. ``fields``: of the columns, which have ``metadata``."""

    fields: Seq[pa.Field]
    check: Callable[[object, int], ModelInput]
    run: Callable[[Seq[Any], Ticket, Mapping[int, BeiError]], Any]
    stand_in: ModelInput
    metadata: Mapping[str, str] = {}


def dense(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """A column ``embedding``, of the width and number format that the options ask for."""
    import pyarrow as pa

    method = methods.embedding(service, options)
    asked = str(options.get("output_dtype") or "float")
    width = int(str(options.get("dimensions") or service.embedding_width))
    numbers = {
        "float16": pa.float16(),
        "int8": pa.int8(),
        "uint8": pa.uint8(),
        "ubinary": pa.uint8(),
        "binary": pa.int8(),
    }
    kind = numbers.get(asked, pa.float32())
    size = width // 8 if asked in ("binary", "ubinary") else width
    field = pa.field("embedding", pa.list_(pa.field("element", kind), size))

    def columns(part: Vectors) -> Mapping[str, pa.Array]:
        return {"embedding": _vectors(part, field.type)}

    return _with_images(_of_method(method, [field], columns))


def _with_images(task: RowTask) -> RowTask:
    """``task``, of which a row may have images."""
    return task._replace(check=lambda value, place: task.check(row_input(value, place), place))


def sparse(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """Columns ``indices`` and ``weights``: lists of one length."""
    import pyarrow as pa

    method = methods.sparse_embedding(service, options)
    fields = [pa.field("indices", pa.list_(pa.int32())), pa.field("weights", pa.list_(pa.float32()))]

    def columns(part: list[SparseVector]) -> Mapping[str, pa.Array]:
        indices, weights = [one.indices for one in part], [one.values for one in part]
        return {
            "indices": _lists(indices, fields[0].type, np.dtype(np.int32)),
            "weights": _lists(weights, fields[1].type, np.dtype(np.float32)),
        }

    return _of_method(method, fields, columns)


def tokens(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """A column ``token_embeddings``: a list of vectors for each row."""
    import pyarrow as pa

    method = methods.token_embedding(service, options)
    width = service.manifest.dimension("token_embedding") or 0
    vector = pa.list_(pa.field("element", pa.float32()), width)
    field = pa.field("token_embeddings", pa.list_(pa.field("element", vector)))

    def columns(part: list[Float32Array]) -> Mapping[str, pa.Array]:
        ends = np.cumsum([0, *(len(one) for one in part)])
        flat = np.concatenate([one.reshape(-1, width) for one in part], dtype=np.float32)
        return {
            "token_embeddings": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), _vectors(flat, vector), field.type)
        }

    return _with_images(_of_method(method, [field], columns))


def classify(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """Columns ``label``, the best one, its ``score``, and ``scores`` of all labels, which the metadata names."""
    import pyarrow as pa

    method = methods.classification(service, options)
    classification = service.manifest.classification
    labels = list(classification.labels) if classification else []
    scores = pa.list_(pa.field("element", pa.float32()), len(labels))
    fields = [pa.field("label", pa.string()), pa.field("score", pa.float32()), pa.field("scores", scores)]

    def columns(part: Predictions) -> Mapping[str, pa.Array]:
        best = part.scores.argmax(axis=1)
        return {
            "label": pa.array([labels[place] for place in best], pa.string()),
            "score": pa.array(part.scores[np.arange(len(best)), best], pa.float32()),
            "scores": _vectors(part.scores, scores),
        }

    metadata = {"labels": msgspec.json.encode(labels).decode()}
    return _of_method(method, fields, columns)._replace(metadata=metadata)


def pair_scores(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """A column ``score`` of pairs of a query and a document."""
    import pyarrow as pa

    asked = checked(RerankOptions, options)
    label = asked.get("label")
    for name in ("score_mode", "score_weights"):
        if options.get(name) is not None:
            raise InvalidRequestError(f"{name} is not for files: embed both sides, and compare the vectors.", name)
    require(service, "rerank" if label is None else "classify")
    if service.manifest.listwise:
        raise ConfigError(
            f"{service.name} scores the documents of a query together, and rows are read one by one: use a reranker of "
            "pairs, or bei.Model.rerank."
        )
    read = encoding_options(
        asked.get("truncate"), asked.get("truncation_direction"), asked.get("truncate_prompt_tokens")
    )

    def check(value: object, place: int) -> ModelInput:
        if not isinstance(value, tuple):
            raise MalformedRequestError(f"inputs {place} is not a query and a document.", "inputs")
        return text(value[0], place, "query"), text(value[1], place, "text")

    async def run(inputs: Seq[ModelInput], ticket: Ticket, errors: Mapping[int, BeiError]) -> Outcome:
        task = RerankTask(
            inputs,
            read,
            errors,
            raw=asked.get("raw_scores", False),
            instruction=asked.get("instruction"),
            label=label,
        )
        scores = await rerank.rerank(service, task, ticket=ticket)
        columns = {"score": pa.array(scores.values[:, 0], pa.float32())}
        return Outcome(columns, scores.num_tokens, scores.truncated, scores.errors)

    return RowTask([pa.field("score", pa.float32())], check, run, ("", ""))


def extract(service: ShardService, options: Mapping[str, object]) -> RowTask:
    """A column ``spans``: a list of start, end, text, label and score for each row; and where they are asked for
    columns ``structures``, ``relations`` and ``classifications``, in JSON, as a route has them."""
    import pyarrow as pa

    given = {name: value for name, value in options.items() if name not in extraction.SchemaToFind._fields}
    asked = extraction.SchemaToFind(*(_asked(options.get(name)) for name in extraction.SchemaToFind._fields))
    if not any(one is not None for one in asked):
        raise ConfigError(
            "--task extract needs --labels, --structures, --relations or --classifications: name what to find."
        )
    method = extraction.schema_extraction(service, asked, given)
    layout = extraction_of(service)
    if layout.label_width is msgspec.UNSET:  # labels that cannot be put in front of texts: no row would have an answer
        found, schema = extraction.schema_to_find(service, asked, checked(ExtractOptions, given))
        parts = schema.parts(found, layout, first_instances(schema))
        prompt = LabelPrompt(found.names if found else (), layout, parts=parts, words=schema.words)
        service.encoder.encode(["a"], EncodingOptions(labels=prompt))
    kinds = [("start", pa.int32()), ("end", pa.int32()), ("text", pa.string()), ("label", pa.string())]
    span = pa.struct([*kinds, ("score", pa.float32())])
    fields = [pa.field("spans", pa.list_(pa.field("element", span)))]
    records = [name for name, one in asked._asdict().items() if one is not None and name != "labels"]
    fields += [pa.field(name, pa.string()) for name in records]

    def columns(part: list[Extracted]) -> Mapping[str, pa.Array]:
        made = {"spans": pa.array([[span._asdict() for span in one.spans] for one in part], fields[0].type)}
        for name in records:
            made[name] = pa.array([_json(getattr(one, name)) for one in part], pa.string())
        return made

    return _of_method(method, fields, columns)


def _asked(given: object) -> Any:
    return {**given} if isinstance(given, Mapping) else given


def _json(found: object) -> str:
    return msgspec.json.encode(_plain(found)).decode()


def _plain(found: object) -> object:
    """Named tuples as objects, with scores in as few digits as float32 has."""
    if isinstance(found, (Value, LabelScore)):
        return {**found._asdict(), "score": float(str(np.float32(found.score)))}
    if isinstance(found, dict):
        return {name: _plain(one) for name, one in found.items()}
    return [*map(_plain, found)] if isinstance(found, list) else found


TASKS: Mapping[str, Callable[[ShardService, Mapping[str, object]], RowTask]] = {
    "embed": dense,
    "sparse": sparse,
    "tokens": tokens,
    "classify": classify,
    "rerank": pair_scores,
    "extract": extract,
}


def _of_method(
    method: Method[Any, Any, Any], fields: Seq[pa.Field], columns: Callable[[Any], Mapping[str, pa.Array]]
) -> RowTask:
    """The task of one of ``bei.Model``'s methods; ``columns`` makes them of the results of all inputs."""

    async def run(inputs: Seq[Any], ticket: Ticket, errors: Mapping[int, BeiError]) -> Outcome:
        result: WindowResult[Any] = await method.run(inputs, ticket, errors)
        return Outcome(columns(result.part), result.num_tokens, result.truncated, result.errors)

    return RowTask(fields, method.check, run, "")


def _vectors(values: Vectors, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _lists(rows: Seq[np.ndarray[Any, Any]], kind: pa.DataType, numbers: np.dtype[Any]) -> pa.Array:
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, rows)])
    flat = np.concatenate([np.zeros(0, numbers), *rows], dtype=numbers)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(flat, kind.value_type), kind)
