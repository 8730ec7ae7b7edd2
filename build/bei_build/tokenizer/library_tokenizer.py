"""A checkpoint's tokenizer as the model's own library loads it.

Users get their ids from it, so the artifact's tokenizer is made from it, and is compared with it id by id
(``token_comparison``). For all models but static embeddings it is the class that transformers chooses: it merges
tokenizer.json, tokenizer_config.json, added_tokens.json and special_tokens_map.json, and overrides tokenizer.json with
settings of its own.
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
# Files from which transformers can make a tokenizer.
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken")
STORED = "tokenizer.json"  # the name for a tokenizer that no class has changed
_TIKTOKEN = "tiktoken.model"  # the only *.model that transformers does not read with sentencepiece


class TokenIds(NamedTuple):
    """A text or pair: token ids, and a token type for each."""

    ids: list[int]
    types: list[int]


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings for loading a checkpoint's tokenizer files.

    ``choice``: "transformers", the tokenizer of the installed version's class; "auto", the same with BOS and EOS that
    tokenizer_config.json asks for by name where that version ignores them; "file", the unchanged tokenizer.json.
    ``arguments``: arguments of the class besides its files (``tokenizer_args`` of sentence-transformers).
    ``is_static``: sentence-transformers reads tokenizer.json of static embeddings without a class, and adds no special
    tokens. ``lowercase`` (``do_lower_case`` of sentence-transformers): texts are lower-cased first. ``markers``:
    prefixes of texts that are one token each, if the vocabulary has them. ``ends_in_eos``: the model's own code appends
    EOS to every text. ``added``: tokens that the model's own code adds to a tokenizer without them. ``model_type``:
    names the class where neither the tokenizer's files nor a config.json do. ``around``: what the model's processor
    writes before and behind every text, in the place of the tokenizer's own special tokens; None: it has none.
    """

    choice: TokenizerChoice = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False
    lowercase: bool = False
    markers: tuple[str, ...] = ()
    ends_in_eos: bool = False
    added: tuple[str, ...] = ()
    model_type: str = ""
    around: tuple[str, str] | None = None


class Padding(NamedTuple):
    """How the library fills up texts: with the token ``token_id`` (None: none is named), on one side, and hidden from
    attention (``is_masked``) or not."""

    token_id: int | None
    side: Side
    is_masked: bool


class LibraryTokenizer(Protocol):
    """The library's tokenizer, named by ``library`` and ``tokenizer_class``.

    ``backend``: the source of the artifact's tokenizer, None where the class is written in Python. ``runs``: the
    tokenizer that ``encode`` runs, None where it is Python. ``surrounded_by``: BOS and EOS by kind that ``encode`` adds
    and ``backend`` does not. ``gives_token_types``: the model gets its token types. ``splits_special_tokens``: special
    tokens in a text are split like other text.
    """

    library: str
    tokenizer_class: str
    backend: Tokenizer | None
    runs: Tokenizer | None
    surrounded_by: Mapping[str, str | None]
    truncation_side: Side
    splits_special_tokens: bool
    gives_token_types: bool
    padding: Padding

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """Token ids of each text or pair, all of one kind, cut to ``max_length`` tokens including special ones. Without
        ``special_tokens`` none are added."""
        ...


def open_tokenizer(folder: Path, settings: TokenizerSettings) -> LibraryTokenizer:
    """The tokenizer of ``folder``. Raises TokenizerError, MissingDependencyError."""
    if settings.is_static or settings.choice == "file":
        return _StoredTokenizer(folder, special_tokens=not settings.is_static)
    _check_files(folder)
    arguments = {**settings.arguments, **_config_of(folder, settings.model_type)}
    loaded = _load(folder, arguments, settings.added)
    asked = _missing_special_tokens(folder, loaded) if settings.choice == "auto" else {}
    if not asked:
        return _TransformersTokenizer(loaded)
    added = {f"add_{kind}_token": token is not None for kind, token in asked.items()}
    again = _load(folder, {**arguments, **added}, settings.added)
    return _TransformersTokenizer(again, _backend(loaded), asked)


def tokenization_of(library: LibraryTokenizer) -> Tokenization:
    """The manifest's record of the tokenizer."""
    return Tokenization(
        library=library.library,
        tokenizer_class=library.tokenizer_class,
        truncation_side=library.truncation_side,
        splits_special_tokens=library.splits_special_tokens,
    )


def check_model(stored: Tokenizer | None, library: LibraryTokenizer, settings: TokenizerSettings) -> None:
    """Refuse a class that loads tokenizer.json, ``stored``, as the vocabulary of another model, unless the user chose
    it: it would find hardly a word. Raises TokenizerError.

    paraphrase-multilingual-MiniLM-L12-v2, a BERT with XLM-RoBERTa's tokenizer, named no class until its authors fixed
    it (https://github.com/embeddings-benchmark/mteb/pull/5377).
    """
    if stored is None or library.backend is None or settings.choice != "auto":
        return
    own, other = (type(tokenizer.model).__name__ for tokenizer in (stored, library.backend))
    if own != other:
        raise TokenizerError(
            f"tokenizer.json holds a vocabulary of {own}, and {library.library} reads it as one of {other}, with "
            f"{library.tokenizer_class}: name the right tokenizer_class in tokenizer_config.json, or choose one of "
            "the two: --tokenizer file, or --tokenizer transformers."
        )


def stored_tokenizer(folder: Path) -> Tokenizer | None:
    """The unchanged tokenizer.json of ``folder``, None where there is none. Raises TokenizerError."""
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
    """A tokenizer of transformers, ``loaded``. ``backend``: its own backend before ``surrounded_by`` was added to
    it."""

    def __init__(
        self, loaded: Any, backend: Tokenizer | None = None, surrounded_by: Mapping[str, str | None] | None = None
    ) -> None:
        import transformers

        self.library = f"transformers {transformers.__version__}"
        self.tokenizer_class = type(loaded).__name__
        self.runs = _backend(loaded)
        self.backend = backend or _serializable(self.runs)
        self.surrounded_by = surrounded_by or {}
        self.truncation_side: Side = "left" if loaded.truncation_side == "left" else "right"
        self.splits_special_tokens = bool(loaded.split_special_tokens)
        self.gives_token_types = "token_type_ids" in loaded.model_input_names
        side: Side = "left" if loaded.padding_side == "left" else "right"
        self.padding = Padding(loaded.pad_token_id, side, "attention_mask" in loaded.model_input_names)
        self._loaded = loaded

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """Token ids of ``texts``; see ``LibraryTokenizer``."""
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
        except Exception as error:  # the tokenizers library raises bare Exception, a class in Python anything
            raise TokenizerError(
                f"{self.library} ({self.tokenizer_class}) fails on a text ({error}): its files do not belong to one "
                "tokenizer. Download them again, or take tokenizer.json as it stands: --tokenizer file."
            ) from error
        ids = found["input_ids"]
        types = found["token_type_ids"] if self.gives_token_types else [[0] * len(row) for row in ids]
        return [TokenIds(*row) for row in zip(ids, types, strict=True)]


class _StoredTokenizer:
    """The unchanged tokenizer.json, run by the tokenizers library."""

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
        self.padding = Padding(None, "right", is_masked=False)
        stored.no_padding()
        self.backend: Tokenizer | None = stored
        self.runs: Tokenizer | None = Tokenizer.from_str(stored.to_str())  # truncation is state
        self._special_tokens = special_tokens

    def encode(self, texts: Sequence[Texts], max_length: int | None, *, special_tokens: bool = True) -> list[TokenIds]:
        """Token ids of ``texts``; see ``LibraryTokenizer``."""
        assert self.runs is not None
        if max_length is None:
            self.runs.no_truncation()
        else:
            self.runs.enable_truncation(max_length, direction=self.truncation_side)
        inputs = [text[0] if len(text) == 1 else text for text in texts]
        found = self.runs.encode_batch(inputs, add_special_tokens=special_tokens and self._special_tokens)
        return [TokenIds(one.ids, one.type_ids) for one in found]


def _check_files(folder: Path) -> None:
    """Refuse entries that are not files, not text, too large, or need another library, before transformers reads
    them."""
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
        # Without these transformers would fall back to tiktoken, and report that it is missing.
        load(module, package, "cpu", f"Reading {models[0].name} (there is no tokenizer.json)")


def _load(folder: Path, arguments: Mapping[str, Any], added: Sequence[str]) -> Any:
    """The tokenizer that transformers' AutoTokenizer loads from ``folder``, with those of ``added`` that it does not
    have. Raises TokenizerError."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, **arguments, trust_remote_code=False)
        loaded.add_tokens([token for token in added if token not in loaded.get_vocab()], special_tokens=True)
        vocabulary, special = set(loaded.get_vocab()), set(loaded.all_special_tokens)
    except BaseException as error:  # transformers raises OSError, ValueError, KeyError, AttributeError, TypeError, ...
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # tokenizers raises it
            raise
        raise _unreadable(folder, error) from error
    if not (folder / "tokenizer.json").is_file() and vocabulary <= special:  # made from a folder without vocabulary
        raise TokenizerError(
            f"{folder} has no tokenizer.json and no other file with a vocabulary. Download the tokenizer's files too."
        )
    if _serializable(_backend(loaded)) is None and not (folder / "tokenizer.json").is_file():
        raise TokenizerError(
            f"The checkpoint's tokenizer ({type(loaded).__name__}) is written in Python, and bei runs those of a "
            "tokenizer.json: write one that gives the same ids, or choose another checkpoint."
        )
    return loaded


def _config_of(folder: Path, model_type: str) -> dict[str, Any]:
    """An argument for models whose class is the repository's own: it names the model. Without it transformers reads all
    of config.json, to find the tokenizer's class, as an unknown model, and fails on some keys. ``model_type``: of
    models without config.json."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / "config.json"
    if model_type and not path.is_file():
        return {"config": CONFIG_MAPPING[model_type]()}
    raw = read_object(path) if path.is_file() else {}
    if raw.get("model_type") in (None, *CONFIG_MAPPING):
        return {}
    named = {key: raw.get(key) for key in ("model_type", "tokenizer_class")}
    return {"config": PreTrainedConfig.from_dict(named)}


def own_code(folder: Path) -> str | None:
    """The entry of tokenizer_config.json for tokenizer code in the repository; None if there is none."""
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


def _serializable(backend: Tokenizer | None) -> Tokenizer | None:
    """``backend``, None where parts of it are written in Python: a tokenizer.json cannot hold them."""
    for part in (backend.normalizer, backend.pre_tokenizer) if backend else ():
        try:
            pickle.dumps(part)
        except Exception:  # the library raises bare Exception: "Custom ... cannot be serialized"
            return None
    return backend


def _missing_special_tokens(folder: Path, loaded: Any) -> dict[str, str | None]:
    """BOS and EOS to add around texts, by kind, where tokenizer_config.json asks for one by name and ``loaded`` does
    not add it; else empty.

    transformers up to 4 follows tokenizer_config.json, 5 follows tokenizer.json: e5-mistral, whose embedding is the
    state of an EOS that only tokenizer_config.json asks for, lost it
    (https://github.com/embeddings-benchmark/mteb/pull/5237).
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
    if all(ids[kind] in added for kind in asked) or not added <= set(ids.values()):  # or adds more than those two
        return {}
    return {kind: tokens[kind] if kind in asked or ids.get(kind) in added else None for kind in tokens}
