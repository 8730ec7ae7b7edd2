"""A reranker's chat template, converted to the text around a pair that the runtime fills in.

sentence-transformers from 5.4 on saves rerankers whose pairs become two messages, with the roles query and document,
and whose prompt becomes one with the role system (base/modality.py, base/modules/transformer.py of 6.2). The result is
found by rendering the chat template, as transformers does, with texts that can be recognized in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from bei.artifact.manifest import RerankTemplate
from bei.errors import CheckpointError
from bei.utils.libraries import importing
from bei_build.files.json_settings import read_object, setting
from bei_build.files.sandbox import SandboxError, run_bounded
from bei_build.tokenizer.artifact_tokenizer import special_tokens
from bei_build.tokenizer.library_tokenizer import read_template

_PURPOSE = "Reading a chat template"
_REMEDY = "Give the text of a pair with --rerank-prefix, --rerank-body and --rerank-suffix."
_SLOTS = ("query", "document", "instruction")
# Two sets of texts: a template that treats them alike gives one result. Blanks around them show whether it keeps
# blanks.
_MARKS = (
    {"query": "\tQbei 7\n", "document": " dBEI x\n\nY ", "instruction": "\nbei.I "},
    {"query": " ?#7 ", "document": "\n" + 40 * "a longer text, " + "\t", "instruction": " {} \t"},
)
_PROBES = (("who?", "me"), ("1 2 3\n", "\n a line.\n\nand another!"), ("é世 x", "."), ("'s", " 42%"))
# sentence-transformers' test for templates whose messages hold lists of parts (InputFormatter._infer_format).
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
# Types of models whose embedded texts are turns.
_EMBEDS_TURNS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "embedding_gemma2", "embedding_gemma2_text")
_FLAT_TYPES = ("apertus", "deepseek_v3", "gpt_oss", "seed_oss")
_FILE = "chat_template.jinja"
_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
# Arguments of apply_chat_template that do not reach the template, and have no effect on a single text.
_IDLE_ARGUMENTS = ("padding", "return_tensors")
# Timeout for rendering a few words, which takes a millisecond; a loaded machine may pause for seconds.
_MOST_S = 10.0
_MOST_EXTRA_BYTES = 256_000_000


@dataclass(frozen=True)
class ChatSettings:
    """The Transformer's settings for messages. ``arguments`` are passed to the template when it is rendered."""

    form: Literal["auto", "flat", "structured"] = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)


def embeds_turns(folder: Path) -> bool:
    """True if the model in ``folder`` embeds texts within turns of its chat template, as bei reads them."""
    path = folder / "config.json"
    return path.is_file() and read_object(path).get("model_type") in _EMBEDS_TURNS


def chat_settings(path: Path, config: dict[str, Any]) -> ChatSettings | None:
    """The settings at ``path`` that turn texts into messages; None where texts stay texts. Raises CheckpointError."""
    modalities = setting(path, config, "modality_config", dict) or {}
    arguments = {**(setting(path, _processing(path, config), "chat_template", dict) or {})}
    if "message" not in modalities:
        return None
    message = modalities["message"]
    form = message.get("format", "auto") if isinstance(message, dict) else None
    if form not in ("auto", "flat", "structured"):
        raise CheckpointError(f"{path} has messages of the format {form!r}; supported: auto, flat, structured.")
    if arguments.pop("restore_suffix", True) is not True:
        raise CheckpointError(f"{path} lets the end of the chat template be cut (restore_suffix): not supported.")
    for name in _IDLE_ARGUMENTS:
        arguments.pop(name, None)
    if sizes := {"max_length", "truncation"} & arguments.keys():
        raise CheckpointError(f"{path} gives the chat template {min(sizes)}: not supported. Use --max-seq-len.")
    return ChatSettings(form, arguments)


def _processing(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``processing_kwargs``. Settings other than a chat template's arguments that would change a text's tokens are
    refused."""
    processing = setting(path, config, "processing_kwargs", dict) or {}
    idle = {*_IDLE_ARGUMENTS, "pad_to_multiple_of", "logits_to_keep"}
    for kind in ("common", "text"):
        asked = sorted((setting(path, processing, kind, dict) or {}).keys() - idle)
        if asked:
            raise CheckpointError(f"{path} has processing_kwargs with {kind} {asked[0]}: not supported.")
    return processing


def derive_template(
    folder: Path, model_type: str, settings: ChatSettings, instruction: str | None, tokenizer: Tokenizer
) -> RerankTemplate:
    """The text that the chat template in ``folder`` puts around a pair. ``instruction``: the checkpoint's default
    prompt.

    Raises CheckpointError where texts come out changed, or where their ends cannot be told from the template's tokens.
    """
    source = _template_of(folder)
    structured = settings.form == "structured" or (
        settings.form == "auto" and model_type not in _FLAT_TYPES and any(part in source for part in _STRUCTURED)
    )
    if "strftime_now" in source:
        raise CheckpointError(f"The chat template in {folder} writes the current time: not supported. {_REMEDY}")
    arguments = {**special_tokens(folder), **settings.arguments}

    def render(marks: Mapping[str, str], roles: tuple[str, ...]) -> str:
        texts = {"system": marks["instruction"], "query": marks["query"], "document": marks["document"]}
        messages = [
            {"role": role, "content": [{"type": "text", "text": texts[role]}] if structured else texts[role]}
            for role in roles
        ]
        return _render(folder, source, messages, arguments)

    shapes = {_shape(render, marks, instruction) for marks in _MARKS}
    if len(shapes) > 1:
        raise CheckpointError(
            f"The chat template in {folder} treats some texts differently from others: not supported. {_REMEDY}"
        )
    whole, default = shapes.pop()
    return _split(whole, default, tokenizer)


class Frame(NamedTuple):
    """What a chat template writes before and behind the text of a user, and before and behind the user's image
    ``image`` token."""

    before: str
    behind: str
    before_image: str
    behind_image: str


def has_template(folder: Path) -> bool:
    """True if there is a chat template in ``folder``."""
    files = ("tokenizer_config.json", *(_PROCESSOR_FILES if embeds_turns(folder) else ()))
    return (folder / _FILE).is_file() or any(
        path.is_file() and read_object(path).get("chat_template") is not None
        for path in (folder / name for name in files)
    )


def derive_frame(folder: Path, settings: ChatSettings, instruction: str | None, image: str) -> Frame:
    """The frame of the chat template in ``folder`` around one text or one image of the user, behind an ``instruction``
    of the system (None: the template's own, if it has one).

    Raises CheckpointError where texts come out changed.
    """
    source = _template_of(folder)
    if "strftime_now" in source:
        raise CheckpointError(f"The chat template in {folder} writes the current time: not supported.")
    arguments = {**special_tokens(folder), **settings.arguments}

    def render(part: Mapping[str, str], mark: str) -> tuple[str, str]:
        system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
        messages = [*([system] if instruction else []), {"role": "user", "content": [part]}]
        before, found, behind = _render(folder, source, messages, arguments).partition(mark)
        if not found or mark in behind:
            raise CheckpointError(
                f"The chat template in {folder} does not write one {part['type']} of a user as it is: not supported."
            )
        return before, behind

    frames = {render({"type": "text", "text": marks["query"]}, marks["query"]) for marks in _MARKS}
    if len(frames) > 1:
        raise CheckpointError(
            f"The chat template in {folder} treats some texts differently from others: not supported."
        )
    return Frame(*frames.pop(), *render({"type": "image", "image": ""}, image))


def image_markers(folder: Path, settings: ChatSettings, roles: tuple[str, ...], image: str) -> tuple[str, str]:
    """What the chat template in ``folder`` writes before and behind the ``image`` token of the last of ``roles``, in
    the place of a text. Raises CheckpointError where it changes more."""
    source = _template_of(folder)
    arguments = {**special_tokens(folder), **settings.arguments}
    text = "bei 7"

    def render(part: Mapping[str, str], mark: str) -> tuple[str, str]:
        parts = [{"type": "text", "text": "?"}] * (len(roles) - 1)
        messages = [{"role": role, "content": [one]} for role, one in zip(roles, [*parts, part], strict=True)]
        before, found, behind = _render(folder, source, messages, arguments).partition(mark)
        if not found or mark in behind:
            raise CheckpointError(
                f"The chat template in {folder} writes no {part['type']} of the role {roles[-1]}: build without images "
                "(--no-images)."
            )
        return before, behind

    (before, behind), (first, last) = render({"type": "text", "text": text}, text), render({"type": "image"}, image)
    if not first.startswith(before) or not last.endswith(behind):
        raise CheckpointError(
            f"The chat template in {folder} writes texts and images in different places: build without images "
            "(--no-images)."
        )
    return first[len(before) :], last[: len(last) - len(behind)]


def mixed_markers(folder: Path, settings: ChatSettings, image: str) -> tuple[str, str] | None:
    """What the chat template in ``folder`` writes before and behind the ``image`` token between texts of a user, which
    it writes one after the other; None where it writes anything else. Raises CheckpointError."""
    source = _template_of(folder)
    arguments = {**special_tokens(folder), **settings.arguments}

    def render(*parts: str) -> str:
        content = [{"type": "image"} if part == image else {"type": "text", "text": part} for part in parts]
        return _render(folder, source, [{"role": "user", "content": content}], arguments)

    one, other = "bei 7", "?#X"
    before, _, behind = render(one).partition(one)
    start, end = before + one, other + behind
    whole = render(one, image, other)
    first, found, last = whole[len(start) : len(whole) - len(end)].partition(image)
    if not found or whole != f"{start}{first}{image}{last}{end}":
        return None
    return (first, last) if render(image, one) == f"{before}{first}{image}{last}{one}{behind}" else None


def repeats_markers(
    folder: Path, settings: ChatSettings, roles: tuple[str, ...], image: str, markers: tuple[str, str]
) -> bool:
    """True if the chat template in ``folder`` writes every image between ``markers`` alone, wherever it stands: several
    among texts of one role, and of each of ``roles``. Raises CheckpointError."""
    source, texts = _template_of(folder), ("bei 7", "?#X")
    arguments = {**special_tokens(folder), **settings.arguments}
    marked = f"{markers[0]}{image}{markers[1]}"

    def render(*contents: tuple[str, ...]) -> str:
        messages = [
            {
                "role": role,
                "content": [{"type": "image"} if one == image else {"type": "text", "text": one} for one in content],
            }
            for role, content in zip(roles, contents, strict=True)
        ]
        return _render(folder, source, messages, arguments)

    def plain(content: tuple[str, ...]) -> str:
        return "".join(marked if one == image else one for one in content)

    for content in ((image, image), (image, texts[0], image, image, texts[1]), (texts[0], image, texts[1], image)):
        if render(*[content] * len(roles)) != render(*[(plain(content),)] * len(roles)):
            return False
    return True


def _shape(render: Any, marks: Mapping[str, str], instruction: str | None) -> tuple[str, str]:
    """The template's text with slots, and the default content of the instruction's slot."""
    if instruction is not None:
        with_system = _with_slots(render(marks, ("system", "query", "document")), marks)
        return with_system, instruction if "{instruction}" in with_system else ""
    plain = _with_slots(render(marks, ("query", "document")), {**marks, "instruction": ""})
    try:
        with_system = _with_slots(render(marks, ("system", "query", "document")), marks)
    except CheckpointError:  # a template for pairs only
        return plain, ""
    before, slot, behind = with_system.partition("{instruction}")
    fits = len(plain) >= len(before) + len(behind) and plain.startswith(before) and plain.endswith(behind)
    if not slot or "{instruction}" in behind or not fits:
        return plain, ""
    return with_system, plain[len(before) : len(plain) - len(behind)]


def _with_slots(rendered: str, marks: Mapping[str, str]) -> str:
    if any(f"{{{slot}}}" in rendered for slot in _SLOTS):
        raise CheckpointError(f"The chat template itself has a text like {{query}}: not supported. {_REMEDY}")
    for slot in _SLOTS:
        if marks[slot]:
            rendered = rendered.replace(marks[slot], f"{{{slot}}}")
    missing = [slot for slot in ("query", "document") if f"{{{slot}}}" not in rendered]
    if missing:
        raise CheckpointError(
            f"The chat template does not write messages of the role {missing[0]} as they are, so the checkpoint "
            f"alone does not say how a pair is written. {_REMEDY}"
        )
    return rendered


def _split(whole: str, instruction: str, tokenizer: Tokenizer) -> RerankTemplate:
    """``whole`` cut at added tokens, where no tokenizer joins the text on either side; checked on examples."""
    tokens = [
        re.escape(token.content)
        for token in tokenizer.get_added_tokens_decoder().values()
        if not (token.lstrip or token.rstrip or token.single_word)
    ]
    added = re.compile("|".join(sorted(tokens, key=len, reverse=True)) or r"(?!)")
    slots = list(re.finditer(r"\{(?:query|document|instruction)\}", whole))
    start, end = slots[0].start(), slots[-1].end()
    last = max((found.end() for found in added.finditer(whole[:start])), default=0)
    behind = added.search(whole, end)
    if end < len(whole) and behind is None:
        raise CheckpointError(
            "The chat template ends in text without a special token, so that cutting a long pair would cut that "
            f"text: not supported. {_REMEDY}"
        )
    cut = behind.start() if behind else len(whole)
    for first in dict.fromkeys((last, 0)):
        template = RerankTemplate(
            prefix=whole[:first], body=whole[first:cut], suffix=whole[cut:], instruction=instruction
        )
        if all(_is_same(template, query, document, tokenizer) for query, document in _PROBES):
            return template
    raise CheckpointError(f"The tokenizer joins the chat template's text with the texts in it. {_REMEDY}")


def _is_same(template: RerankTemplate, query: str, document: str, tokenizer: Tokenizer) -> bool:
    """True if the three parts together give the tokens of the whole."""
    texts = {"query": query, "document": document, "instruction": template.instruction}
    body = re.sub(r"\{(query|document|instruction)\}", lambda slot: texts[slot[1]], template.body)
    parts = (template.prefix, body, template.suffix)
    ids = [tokenizer.encode(part, add_special_tokens=False).ids for part in ("".join(parts), *parts)]
    return bool(ids[0] == ids[1] + ids[2] + ids[3])


def _template_of(folder: Path) -> str:
    """The template by transformers' rules: a file of its own, else tokenizer_config.json; a processor, which reads the
    texts that are turns, looks into files of its own before both."""
    for own in (folder / name for name in _PROCESSOR_FILES if embeds_turns(folder)):
        if own.is_file() and (found := setting(own, read_object(own), "chat_template", str)) is not None:
            return found
    path, config_path = folder / _FILE, folder / "tokenizer_config.json"
    if path.is_file():
        return read_template(path)
    template = read_object(config_path).get("chat_template") if config_path.is_file() else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise CheckpointError(
            f"{folder} turns texts into messages, but has no chat template (chat_template.jinja, or chat_template in "
            f"tokenizer_config.json). Download the tokenizer's files too. {_REMEDY}"
        )
    return template


def _render(folder: Path, source: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    """Render in transformers' sandbox (jinja2's ImmutableSandboxedEnvironment)."""
    with importing("jinja2", "cpu", _PURPOSE):
        import jinja2  # noqa: F401  # the renderer needs it, and does not report that on import
    with importing("transformers", "cpu", _PURPOSE):
        import transformers.utils.chat_template_utils  # noqa: F401
    try:
        return _rendered(source, json.dumps(messages), json.dumps(arguments))
    except SandboxError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The chat template in {folder} cannot be rendered ({reason}). {_REMEDY}") from error


@lru_cache(maxsize=256)  # a build asks for some renderings again, and each takes a process
def _rendered(source: str, messages: str, arguments: str) -> str:
    """``messages`` and ``arguments`` in JSON. Raises SandboxError."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def work() -> str:
        # It returns texts and their locations.
        found = render_jinja_template([json.loads(messages)], chat_template=source, **json.loads(arguments))
        return str(found[0][0])

    return run_bounded(work, _MOST_S, _MOST_EXTRA_BYTES)
