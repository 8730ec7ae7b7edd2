"""Prompts: choosing a request's prompt, applying it to texts, and the query and document roles that prompts name."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple, TypeVar

from bei.artifact.manifest import Adapters, Manifest
from bei.artifact.sides import OTHER_KINDS, SIDES, Role, names_of
from bei.errors import InvalidRequestError
from bei.tokenizer.adapters import is_task
from bei.tokenizer.encoder import EncodingOptions, Input
from bei.utils.ranges import shown

SLOT = "{text}"  # in a prompt: the place of the text

InputT = TypeVar("InputT")


def prompt_of(manifest: Manifest, prompt_name: str | None = None, input_type: str | None = None) -> str:
    """The prompt of a request: the one called ``prompt_name``, the one for ``input_type``, or the default. It is a
    prefix, or a template (``apply_prompt``).

    A model without prompts treats all input types alike that APIs name; documents have a prompt only if the model
    defines one. Raises InvalidRequestError, which lists the prompts, for an unknown name, for texts that the model does
    not read, and for contradicting names.
    """
    _check_route(manifest, prompt_name, input_type)
    prompts = manifest.prompts
    if prompt_name is not None:
        if prompt_name not in prompts:
            raise InvalidRequestError(_no_prompt(manifest, prompt_name), "prompt_name")
        if input_type is not None and not is_task(manifest, input_type):
            _check_same(manifest, prompt_name, input_type)
        return prompts[prompt_name]
    if input_type is None:
        return prompts.get(manifest.default_prompt_name or "", "")
    task, _, of_task = input_type.rpartition(".")
    side = of_task if is_task(manifest, task) else input_type
    names = next((names for names in SIDES.values() if side in names), ())
    for name in (input_type, *names):
        if name in prompts:
            return prompts[name]
    if is_task(manifest, input_type):
        return prompts.get(manifest.default_prompt_name or "", "")
    # An adapter is trained for one kind of text: a query's vector cannot serve as a document's.
    if prompts and (input_type not in SIDES["document"] or manifest.spec.adapter):
        raise InvalidRequestError(_no_prompt(manifest, input_type), "input_type")
    if not names and input_type not in OTHER_KINDS:
        raise InvalidRequestError(
            f"input_type {shown(input_type)} is no kind of text, and {manifest.name} has no prompts: send query or "
            "document, or leave it out.",
            "input_type",
        )
    return ""


class ChosenPrompt(NamedTuple):
    """A prompt, and a warning if the request names none and the model was trained with prompts, or reads queries and
    documents differently."""

    text: str
    warning: str | None = None


def choose_prompt(
    manifest: Manifest, prompt_name: str | None = None, input_type: str | None = None, prompt: str | None = None
) -> ChosenPrompt:
    """``prompt`` itself, or the result of ``prompt_of``. Raises InvalidRequestError."""
    if prompt is not None:
        if prompt_name is not None:
            raise InvalidRequestError("prompt and prompt_name contradict each other: send one.", "prompt_name")
        _check_route(manifest, prompt_name, input_type)
        return ChosenPrompt(prompt)
    text = prompt_of(manifest, prompt_name, input_type)
    if prompt_name is not None or input_type is not None:
        return ChosenPrompt(text)
    routes = manifest.routes
    if routes and (not SIDES.keys().isdisjoint(routes.absent) or any(role.table for role in manifest.roles.values())):
        name = manifest.name
        return ChosenPrompt(
            text, f"{name} took the texts for the side {routes.default}: say by input_type what they are"
        )
    if text or not any(manifest.prompts.values()):
        return ChosenPrompt(text)
    return ChosenPrompt("", f"{manifest.name} has prompts and got none: say by input_type what the texts are")


def _check_same(manifest: Manifest, prompt_name: str, input_type: str) -> None:
    """Raise InvalidRequestError if the two contradict each other. With late interaction, ``input_type`` may name the
    role beside a prompt of another name."""
    if manifest.roles:
        sides = [side for side, names in SIDES.items() if not {prompt_name, input_type}.isdisjoint(names)]
        differ = len(sides) > 1
    else:
        differ = prompt_of(manifest, None, input_type) != manifest.prompts[prompt_name]
    if differ:
        raise InvalidRequestError(
            f"prompt_name {prompt_name} and input_type {input_type} contradict each other: send one.", "prompt_name"
        )


def role_of(manifest: Manifest, prompt_name: str | None = None, input_type: str | None = None) -> Role | None:
    """The role in which texts are read: that of ``prompt_name``, else of ``input_type``, else the default prompt's; a
    model with routes falls back to its default route."""
    given = [name for name in (prompt_name, input_type) if name is not None]
    if manifest.routes is not None:
        named = [*given, manifest.routes.default or ""]
    else:
        named = given or [manifest.default_prompt_name or ""]
    for name in named:
        for side, role in manifest.roles.items():
            if name in SIDES[side]:
                return role
    return None


def with_role(options: EncodingOptions, role: Role | None) -> EncodingOptions:
    """``options`` with the settings of ``role``; a request may lower the role's limit."""
    if role is None:
        return options
    limits = [limit for limit in (options.max_tokens, role.max_tokens) if limit is not None]
    return replace(
        options,
        max_tokens=min(limits, default=None),
        expansion=role.expansion,
        add_special_tokens=options.add_special_tokens and not role.table,
    )


def apply_prompt(prompt: str, texts: Seq[str]) -> Seq[str]:
    """``texts`` with ``prompt`` as prefix, or inserted at its slot {text}."""
    if not prompt:
        return texts
    before, after = split_prompt(prompt)
    return [before + text + after for text in texts]


def apply_prompt_to_inputs(prompt: str, inputs: Seq[InputT]) -> Seq[InputT | str]:
    """``inputs`` with ``prompt`` applied to single texts; pairs, token ids and images are unchanged."""
    if not prompt:
        return inputs
    before, after = split_prompt(prompt)
    return [before + value + after if isinstance(value, str) else value for value in inputs]


def apply_default_prompt(manifest: Manifest, inputs: Seq[Input]) -> Seq[Input]:
    """``inputs`` with the default prompt applied to single texts and to the first text of each pair, as cross-encoders
    are trained. Templates contain it already."""
    prompt = prompt_of(manifest)
    if not prompt or manifest.rerank_template is not None:
        return inputs
    before, after = split_prompt(prompt)
    # Equal queries share one string: otherwise a long query would be stored once for each document.
    around = functools.cache(lambda text: before + text + after)
    return [around(value) if isinstance(value, str) else (around(value[0]), value[1]) for value in inputs]


def keep_prompt(prompt: str, options: EncodingOptions) -> EncodingOptions:
    """``options`` that preserve ``prompt`` when a text is truncated on the side of the prompt."""
    if not prompt:
        return options
    before, after = split_prompt(prompt)
    return replace(options, kept=(before, after)) if after or (before and options.direction == "left") else options


def num_chars(prompt: str) -> int:
    """Characters that ``prompt`` puts around each text."""
    return sum(map(len, split_prompt(prompt)))


def split_prompt(prompt: str) -> tuple[str, str]:
    """The parts of ``prompt`` before and after the text."""
    before, _, after = prompt.partition(SLOT)
    return before, after


def _check_route(manifest: Manifest, prompt_name: str | None, input_type: str | None) -> None:
    """Raise InvalidRequestError for texts whose route the artifact does not hold, and for texts without a role if the
    library defines no default."""
    routes = manifest.routes
    if routes is None:
        return
    given = {"prompt_name": prompt_name, "input_type": input_type}
    for param, name in given.items():
        if name is not None and any(name in names_of(route) for route in routes.absent):
            raise InvalidRequestError(
                f"{manifest.name} does not read {name!r}: it was built with one route of its Router, "
                f"{routes.default!r}. Leave {param} out, or ask a model that was built with the other one (bei build "
                "--route).",
                param,
            )
    if routes.default is None and not any(name in names for name in given.values() for names in SIDES.values()):
        raise InvalidRequestError(
            f"{manifest.name} reads queries and documents by different modules, and its Router has no default: say by "
            "input_type which of the two the texts are.",
            "input_type",
        )


def _no_prompt(manifest: Manifest, name: str) -> str:
    known = ", ".join(manifest.prompts) or "none"
    adapters = manifest.adapters
    tasks = f" Its tasks: {', '.join(adapters.tasks)}." if isinstance(adapters, Adapters) and adapters.tasks else ""
    return f"{manifest.name} has no prompt for {name!r}. Its prompts: {known}.{tasks}"
