"""A checkpoint's tokenizer as the model's own library has it.

Users get their ids from it, so the artifact's tokenizer is made of it, and is compared with it id by id
(``token_comparison``). For all models but static embeddings that is the class that transformers chooses: it merges
tokenizer.json, tokenizer_config.json, added_tokens.json and special_tokens_map.json, and puts settings of its own over
what tokenizer.json says.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import tokenizers
from tokenizers import Tokenizer

from bei.artifact.manifest import Tokenization
from bei.errors import CheckpointError, TokenizerError
from bei.tokenizer.file import read_tokenizer
from bei.utils.libraries import load
from bei.utils.untrusted_files import MOST_TOKENIZER_BYTES, UnfitError, check_regular, read_bounded
from bei_build.files.json_settings import read_object

TokenizerChoice = Literal["auto", "transformers", "file"]
TOKENIZERS: tuple[TokenizerChoice, ...] = get_args(TokenizerChoice)
Side: TypeAlias = Literal["left", "right"]
# One text, or two that the model reads together.
Texts: TypeAlias = tuple[str, ...]

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MOST_TEMPLATE_BYTES = 1_000_000
# Files that transformers makes a tokenizer of.
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken")
STORED = "tokenizer.json"  # the name of what no class has changed
_TIKTOKEN = "tiktoken.model"  # the only *.model that transformers does not read with sentencepiece


class TokenIds(NamedTuple):
    """A text or pair: token ids, and a token type for each."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True)
class TokenizerReading:
    """How a checkpoint's tokenizer files are read.

    ``choice``: "transformers", what the installed version's class makes of them; "auto", the same with BOS and EOS that
    tokenizer_config.json asks for by name where that version passes over them; "file", tokenizer.json as it stands.
    ``arguments``: what the class is given beside its files (``tokenizer_args`` of sentence-transformers).
    ``is_static``: sentence-transformers reads tokenizer.json of static embeddings without a class, and adds no
    special tokens. ``lowercase`` (``do_lower_case`` of sentence-transformers): texts are lower-cased first.
    ``markers``: beginnings of texts that are one token each, if the vocabulary has them. ``ends_in_eos``: the model's
    own code puts EOS behind every text.
    """

    choice: TokenizerChoice = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False
    lowercase: bool = False
    markers: tuple[str, ...] = ()
    ends_in_eos: bool = False


class LibraryTokenizer(Protocol):
    """``library`` and ``tokenizer_class`` name it.

    ``backend``: what the artifact's tokenizer is made of, None where the class is written in Python. ``runs``: what
    ``encode`` runs itself, None where that is Python. ``surrounded_by``: BOS and EOS by kind that ``encode`` adds and
    ``backend`` does not. ``gives_token_types``: the model is given them. ``splits_special_tokens``: special tokens that
    a text contains are split as other text is.
    """

    library: str
    tokenizer_class: str
    backend: Tokenizer | None
    runs: Tokenizer | None
    surrounded_by: Mapping[str, str | None]
    truncation_side: Side
    splits_special_tokens: bool
    gives_token_types: bool

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """Each text or pair, cut to ``max_length`` tokens, special ones counted; all of one kind. Without
        ``special_tokens`` none stand around them."""
        ...


def open_tokenizer(folder: Path, reading: TokenizerReading) -> LibraryTokenizer:
    """The tokenizer of ``folder``. Raises TokenizerError, MissingDependencyError."""
    if reading.is_static or reading.choice == "file":
        return _StoredTokenizer(folder, special_tokens=not reading.is_static)
    _check_files(folder)
    loaded = _load(folder, reading.arguments)
    asked = _passed_over(folder, loaded) if reading.choice == "auto" else {}
    if not asked:
        return _TransformersTokenizer(loaded)
    added = {f"add_{kind}_token": token is not None for kind, token in asked.items()}
    return _TransformersTokenizer(_load(folder, {**reading.arguments, **added}), _backend(loaded), asked)


def tokenization_of(library: LibraryTokenizer) -> Tokenization:
    """What the manifest says of it."""
    return Tokenization(
        library=library.library,
        tokenizer_class=library.tokenizer_class,
        truncation_side=library.truncation_side,
        splits_special_tokens=library.splits_special_tokens,
    )


def check_model(stored: Tokenizer | None, library: LibraryTokenizer, reading: TokenizerReading) -> None:
    """Refuse a class that reads tokenizer.json, ``stored``, as a vocabulary of another model, unless it was asked for:
    it finds hardly a word. Raises TokenizerError.

    paraphrase-multilingual-MiniLM-L12-v2, a BERT with XLM-RoBERTa's tokenizer, named no class until its authors
    mended it (https://github.com/embeddings-benchmark/mteb/pull/5377).
    """
    if stored is None or library.backend is None or reading.choice != "auto":
        return
    own, other = (type(tokenizer.model).__name__ for tokenizer in (stored, library.backend))
    if own != other:
        raise TokenizerError(
            f"tokenizer.json holds a vocabulary of {own}, and {library.library} reads it as one of {other}, with "
            f"{library.tokenizer_class}: name the right tokenizer_class in tokenizer_config.json, or choose one of "
            "the two: --tokenizer file, or --tokenizer transformers."
        )


def stored_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer.json of ``folder`` as it is, None where there is none. Raises TokenizerError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return read_tokenizer(path)
    except (UnfitError, OSError) as error:
        raise TokenizerError(f"{path} is not a readable tokenizer ({error}). Download the checkpoint again.") from error


def read_template(path: Path) -> str:
    """The chat template in the file ``path``. Raises CheckpointError."""
    try:
        return read_bounded(path, _MOST_TEMPLATE_BYTES).decode()
    except ValueError as error:
        raise CheckpointError(f"{path} is no chat template ({error}). Download the checkpoint again.") from error


def token_of(folder: Path, kind: str) -> str | None:
    """The ``kind`` token ("bos", "eos", ...) as tokenizer_config.json spells it, else special_tokens_map.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        token = read_object(path).get(f"{kind}_token") if path.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


class _TransformersTokenizer:
    """``loaded``: an object of transformers. ``backend``: its own before it was told to add ``surrounded_by``."""

    def __init__(
        self, loaded: Any, backend: Tokenizer | None = None, surrounded_by: Mapping[str, str | None] | None = None
    ) -> None:
        import transformers

        self.library = f"transformers {transformers.__version__}"
        self.tokenizer_class = type(loaded).__name__
        self.runs = _backend(loaded)
        self.backend = backend or _kept(self.runs)
        self.surrounded_by = surrounded_by or {}
        self.truncation_side: Side = "left" if loaded.truncation_side == "left" else "right"
        self.splits_special_tokens = bool(loaded.split_special_tokens)
        self.gives_token_types = "token_type_ids" in loaded.model_input_names
        self._loaded = loaded

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """As LibraryTokenizer says."""
        if not texts:
            return []
        try:
            found = self._loaded(
                *(list(side) for side in zip(*texts, strict=True)),
                add_special_tokens=special_tokens,
                truncation=max_length is not None,
                max_length=max_length,
                padding=False,
                return_attention_mask=False,
                return_token_type_ids=self.gives_token_types,
            )
        except Exception as error:  # the tokenizers library raises bare Exception, a class in Python whatever it likes
            raise TokenizerError(
                f"{self.library} ({self.tokenizer_class}) fails on a text ({error}): its files do not belong to one "
                "tokenizer. Download them again, or take tokenizer.json as it stands: --tokenizer file."
            ) from error
        ids = found["input_ids"]
        types = found["token_type_ids"] if self.gives_token_types else [[0] * len(row) for row in ids]
        return [TokenIds(*row) for row in zip(ids, types, strict=True)]


class _StoredTokenizer:
    """tokenizer.json as it stands, run by the tokenizers library."""

    tokenizer_class = STORED
    surrounded_by: Mapping[str, str | None] = {}
    splits_special_tokens = False
    gives_token_types = True

    def __init__(self, folder: Path, *, special_tokens: bool) -> None:
        stored = stored_tokenizer(folder)
        if stored is None:
            raise TokenizerError(f"{folder} has no tokenizer.json. Download the tokenizer's files too.")
        self.library = f"tokenizers {tokenizers.__version__}"
        truncation = stored.truncation
        self.truncation_side: Side = "left" if truncation and truncation["direction"] == "left" else "right"
        stored.no_padding()
        self.backend: Tokenizer | None = stored
        self.runs: Tokenizer | None = Tokenizer.from_str(stored.to_str())  # truncation is state
        self._special_tokens = special_tokens

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """As LibraryTokenizer says."""
        assert self.runs is not None
        if max_length is None:
            self.runs.no_truncation()
        else:
            self.runs.enable_truncation(max_length, direction=self.truncation_side)
        inputs = [text[0] if len(text) == 1 else text for text in texts]
        found = self.runs.encode_batch(inputs, add_special_tokens=special_tokens and self._special_tokens)
        return [TokenIds(one.ids, one.type_ids) for one in found]


def _check_files(folder: Path) -> None:
    """Before transformers reads them: what is no file, no text, too large, or needs another library."""
    for path in folder.glob("*.jinja"):
        read_template(path)
    for path in (folder / name for name in _SETTINGS):
        if path.is_file():
            read_object(path)
    for path in (path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        try:
            check_regular(path, MOST_TOKENIZER_BYTES)
        except UnfitError as error:
            raise TokenizerError(f"{path} is not a readable vocabulary: {error}. Download it again.") from error
    models = [path for path in sorted(folder.glob("*.model")) if path.name != _TIKTOKEN]
    if not models or (folder / "tokenizer.json").is_file():
        return
    for module, package in (("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")):
        # Without them transformers would fall back to tiktoken, and ask for that.
        load(module, package, "cpu", f"Reading {models[0].name} (there is no tokenizer.json)")


def _load(folder: Path, arguments: Mapping[str, Any]) -> Any:
    """What transformers' AutoTokenizer makes of ``folder``. Raises TokenizerError."""
    from transformers import AutoTokenizer

    arguments = {**arguments, **_config_of(folder), "trust_remote_code": False}
    try:
        loaded = AutoTokenizer.from_pretrained(folder, **arguments)
        vocabulary, special = set(loaded.get_vocab()), set(loaded.all_special_tokens)
    except BaseException as error:  # transformers raises OSError, ValueError, KeyError, AttributeError, TypeError, ...
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of the tokenizers library
            raise
        raise _unreadable(folder, error) from error
    if not (folder / "tokenizer.json").is_file() and vocabulary <= special:  # made of a folder without any such file
        raise TokenizerError(
            f"{folder} has no tokenizer.json and no other file with a vocabulary. Download the tokenizer's files too."
        )
    if _kept(_backend(loaded)) is None and not (folder / "tokenizer.json").is_file():
        raise TokenizerError(
            f"The checkpoint's tokenizer ({type(loaded).__name__}) is written in Python, and bei runs those of a "
            "tokenizer.json: write one that gives the same ids, or choose another checkpoint."
        )
    return loaded


def _config_of(folder: Path) -> dict[str, Any]:
    """The argument that names a model whose class is the repository's own: transformers, which asks the config for the
    tokenizer's class, would read all of config.json as a model that it knows nothing of, and fails at some keys."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / "config.json"
    raw = read_object(path) if path.is_file() else {}
    if raw.get("model_type") in (None, *CONFIG_MAPPING):
        return {}
    named = {key: raw.get(key) for key in ("model_type", "tokenizer_class")}
    return {"config": PreTrainedConfig.from_dict(named)}


def own_code(folder: Path) -> str | None:
    """What tokenizer_config.json says of code of the tokenizer's own; None where it says nothing."""
    path = folder / "tokenizer_config.json"
    named = read_object(path).get("auto_map") if path.is_file() else None
    return None if not named else f"auto_map {json.dumps(named)}"


def _unreadable(folder: Path, error: BaseException) -> TokenizerError:
    reason = " ".join(str(error).split())[:500]
    if (code := own_code(folder)) is not None:
        return TokenizerError(
            f"The tokenizer in {folder} is code of its own ({code} in tokenizer_config.json), which bei does not run, "
            f"and transformers has no class for it ({type(error).__name__}). If its tokenizer.json gives the same ids, "
            "take it: --tokenizer file."
        )
    if not (folder / "tokenizer.json").is_file():
        return TokenizerError(
            f"{folder} has no tokenizer.json, and transformers could not make one from its other files ({reason}). "
            "Download the tokenizer's files too."
        )
    return TokenizerError(
        f"transformers does not read the tokenizer in {folder} ({type(error).__name__}: {reason}). Correct its files, "
        "or take tokenizer.json as it stands: --tokenizer file."
    )


def _backend(loaded: Any) -> Tokenizer | None:
    found: Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
    return found


def _kept(backend: Tokenizer | None) -> Tokenizer | None:
    """``backend``, None where parts of it are written in Python: a tokenizer.json cannot hold them."""
    for part in (backend.normalizer, backend.pre_tokenizer) if backend else ():
        try:
            pickle.dumps(part)
        except Exception:  # the library raises bare Exception: "Custom ... cannot be serialized"
            return None
    return backend


def _passed_over(folder: Path, loaded: Any) -> dict[str, str | None]:
    """BOS and EOS that are to stand around texts, by kind, where tokenizer_config.json asks for one by name and
    ``loaded`` does not add it; else nothing.

    transformers up to 4 follows tokenizer_config.json, 5 follows tokenizer.json: e5-mistral, whose embedding is the
    state of an EOS that only tokenizer_config.json asks for, lost it (https://github.com/embeddings-benchmark/mteb/pull/5237).
    """
    path, backend = folder / "tokenizer_config.json", _backend(loaded)
    config = read_object(path) if path.is_file() else {}
    if backend is None:
        return {}
    tokens = {kind: token_of(folder, kind) for kind in ("bos", "eos")}
    ids = {kind: backend.token_to_id(token) for kind, token in tokens.items() if token is not None}
    ids = {kind: index for kind, index in ids.items() if index is not None}
    empty = backend.encode("")
    added = {index for index, is_read in zip(empty.ids, empty.attention_mask, strict=True) if is_read}  # no padding
    asked = {kind for kind in ids if config.get(f"add_{kind}_token") is True}
    if all(ids[kind] in added for kind in asked) or not added <= set(ids.values()):  # or more than those two
        return {}
    return {kind: tokens[kind] if kind in asked or ids.get(kind) in added else None for kind in tokens}
