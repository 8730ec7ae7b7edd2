"""Artifacts that somebody made to do harm: each is the tiny one, spoilt, with hashes and digest that fit.

Whoever builds an artifact writes its hashes too, so they keep nobody from writing anything into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bei.artifact.manifest import CERTIFICATE, CERTIFICATE_PAGE, MANIFEST, SCHEMA_VERSION, TOKENIZER
from bei.errors import (
    ArtifactError,
    ArtifactFileMissingError,
    ArtifactFileUnlistedError,
    ArtifactHashMismatchError,
    ArtifactManifestError,
    ArtifactSchemaNewerError,
)
from tests.support.spoilt_artifacts import (
    ENGINE_FILE,
    EXPANSION,
    PROFILE,
    ROLE,
    TEMPLATE,
    Spoil,
    beside_linked,
    certificate,
    dangling,
    device,
    extra,
    extra_link,
    kind,
    labelled,
    large,
    large_table,
    linked,
    list_again,
    lists,
    manifest_of,
    many,
    nested,
    output,
    package,
    pipe,
    plan,
    raw,
    says,
    says_all,
    seal,
    text,
    with_id,
    without_engine,
    without_template,
)


@dataclass(frozen=True)
class Hostile:
    """How the good artifact in a folder is spoilt, and what it is refused with. ``command`` is the first to see it."""

    spoil: Spoil
    message: str
    error: type[ArtifactError] = ArtifactManifestError
    command: str = "inspect"


_LIMITS = {
    f"{name} {value}": Hostile(says(name, value=value), f"{name} is -?[0-9]+, and must be from 1 to")
    for name in ("max_num_tokens", "max_batch_size", "max_seq_len")
    for value in (0, -1, 10**12)
}
_SCHEMAS = {
    f"schema {value!r}": Hostile(
        text(old=f'"schema_version": {SCHEMA_VERSION}', new=f'"schema_version": {value}'),
        rf"is not a manifest of schema {SCHEMA_VERSION} \(",
    )
    for value in (
        f'"{SCHEMA_VERSION}"',
        "-7",
        f"{SCHEMA_VERSION}.5",
        "null",
        "true",
        f"{SCHEMA_VERSION - 1}",
        "[7]",
        "1e400",
    )
}
_PATHS = {
    f"path {name[:20]!a}": Hostile(lists(name), message)
    for name, message in {
        "../outside": "leads out of its folder",
        "engine/../../outside": "leads out of its folder",
        "/etc/hostname": "is no path of a file",
        "engine/a\0b": "has a NUL byte",
        "engine/" + "a" * 300: "is longer than a path may be",
        "/".join(["engine", *["a" * 200] * 30]): "is longer than a path may be",
        "": "is no path of a file",
        "engine//fake.bin": "is no path of a file",
        "./tokenizer.json": "is no path of a file",
        "manifest.json": "is no path of a file",
    }.items()
}

HOSTILE: dict[str, Hostile] = {
    **_PATHS,
    **_LIMITS,
    **_SCHEMAS,
    "schema missing": Hostile(
        text(old=f'  "schema_version": {SCHEMA_VERSION},\n', new=""), rf"is not a manifest of schema {SCHEMA_VERSION}"
    ),
    "schema of the future": Hostile(
        text(old=f'"schema_version": {SCHEMA_VERSION}', new=f'"schema_version": {SCHEMA_VERSION + 1}'),
        "upgrade bei",
        ArtifactSchemaNewerError,
    ),
    # Files.
    "file linked from outside": Hostile(linked(ENGINE_FILE, "../../fake.bin"), "a link that leads out of its folder"),
    "folder linked from outside": Hostile(linked("engine", "../engine"), "a link that leads out of its folder"),
    "page linked to itself": Hostile(linked(CERTIFICATE_PAGE, CERTIFICATE_PAGE), "leads nowhere|cannot be looked at"),
    "link to itself": Hostile(linked(ENGINE_FILE, "fake.bin"), "leads nowhere|cannot be looked at"),
    "link to nothing": Hostile(dangling, "a link to a file that is not there"),
    "link to a device": Hostile(device, "a link that leads out of its folder"),
    "pipe for an engine": Hostile(pipe(ENGINE_FILE), "no regular file"),
    "pipe for a tokenizer": Hostile(pipe(TOKENIZER), "no regular file"),
    "pipe for a certificate": Hostile(pipe(CERTIFICATE), "no regular file"),
    "pipe for a manifest": Hostile(pipe(MANIFEST), "is not an artifact", ArtifactFileMissingError),
    "file listed twice": Hostile(
        lambda folder: seal(folder, {**(content := manifest_of(folder)), "files": content["files"] * 2}), "twice"
    ),
    "size below zero": Hostile(lambda folder: list_again(folder, TOKENIZER, -1), "an invalid size or sha256"),
    "sha256 of another form": Hostile(
        lambda folder: list_again(folder, TOKENIZER, 5, "../" * 21 + "x"), "an invalid size or sha256"
    ),
    "no engine": Hostile(without_engine, "nothing in engine/"),
    "weights beside the engine": Hostile(
        extra("engine/model.bin"), r"engine/model\.bin' that its manifest does not list", ArtifactFileUnlistedError
    ),
    "weights in a folder beside the engine": Hostile(
        extra("engine/sub/model.safetensors"), "does not list", ArtifactFileUnlistedError
    ),
    "a dotfile beside the engine": Hostile(
        extra("engine/.DS_Store"), r"engine/\.DS_Store' that its manifest does not list", ArtifactFileUnlistedError
    ),
    "a file in the root": Hostile(extra("config.json"), "a file 'config.json'.*delete it", ArtifactFileUnlistedError),
    "a dotfile in the root": Hostile(extra(".env"), r"a file '\.env'", ArtifactFileUnlistedError),
    "a page in a folder of its own": Hostile(extra("docs/page.html"), r"docs/page\.html", ArtifactFileUnlistedError),
    "a file in a linked engine's folder": Hostile(beside_linked, r"engine/more\.bin'", ArtifactFileUnlistedError),
    "a folder linked into the engine's": Hostile(extra_link, "engine/more'", ArtifactFileUnlistedError),
    "answers of a reference that nobody built": Hostile(
        extra("reference/reference.json"), r"reference/reference\.json'", ArtifactFileUnlistedError
    ),
    # JSON.
    "manifest of 2 GB": Hostile(large(MANIFEST), r"has 2,147,483,648 bytes, more than"),
    "certificate of 2 GB": Hostile(large(CERTIFICATE), r"has 2,147,483,648 bytes, more than"),
    "tokenizer of 2 GB": Hostile(large(TOKENIZER), r"has 2,147,483,648 bytes, more than"),
    "manifest nested a million deep": Hostile(raw(lambda _: nested(1_000_000)), "is not a manifest of schema"),
    "manifest nested in a field": Hostile(
        text(old='"name": "tiny"', new='"name": ' + "[" * 100_000 + "]" * 100_000), "is not a manifest of schema"
    ),
    "certificate nested a million deep": Hostile(raw(lambda _: nested(1_000_000), CERTIFICATE), "cannot be read"),
    "manifest of no UTF-8": Hostile(raw(lambda content: content.replace(b"tiny", b"\xff\xfe", 1)), "is not a manifest"),
    "manifest with half a character": Hostile(
        text(old='"name": "tiny"', new='"name": "\\ud800"'), "is not a manifest|was changed after", ArtifactError
    ),
    "certificate of no UTF-8": Hostile(
        raw(lambda content: content.replace(b"hello", b"\xff\xfe", 1), CERTIFICATE), "cannot be read"
    ),
    "manifest with a key twice": Hostile(
        text(old='  "name": "tiny",\n', new='  "name": "good",\n  "name": "tiny",\n'),
        "was changed after the build",
        ArtifactHashMismatchError,
    ),
    "certificate with a key twice": Hostile(
        raw(lambda content: content.replace(b'"passed"', b'"passed": false,\n  "passed"', 1), CERTIFICATE),
        "has the key 'passed' twice",
    ),
    "manifest cut off": Hostile(raw(lambda content: content[: len(content) // 2]), "is not a manifest of schema"),
    "manifest with more behind it": Hostile(raw(lambda content: content + b"{}"), "is not a manifest of schema"),
    "manifest that is a list": Hostile(raw(lambda content: b"[" + content + b"]"), "is not a manifest of schema"),
    "number beyond all numbers": Hostile(
        text(old='"num_parameters": 1', new='"num_parameters": ' + "9" * 5000), "is not a manifest of schema"
    ),
    "limit as a text": Hostile(text(old='"max_seq_len": 16', new='"max_seq_len": "16"'), "is not a manifest of schema"),
    "field that nobody knows": Hostile(
        text(old='  "name": "tiny",', new='  "run": "rm",\n  "name": "tiny",'), "is not a manifest of schema"
    ),
    # Limits, names, tasks, outputs.
    "a sequence longer than a batch": Hostile(says("max_seq_len", value=65), "cannot hold one sequence of max_seq_len"),
    "more sequences than tokens": Hostile(says("max_batch_size", value=65), "max_batch_size 65 is more than"),
    "no name": Hostile(says("name", value=""), "name: it has 0 characters"),
    "a name of blanks": Hostile(says("name", value="   "), "not only blanks"),
    "a name that a terminal obeys": Hostile(says("name", value="\x1b[2J"), "characters that cannot be printed"),
    "a name of two lines": Hostile(says("name", value="a\nb"), "characters that cannot be printed"),
    "a name without an end": Hostile(says("name", value="a" * 100_000), "it has 100000 characters"),
    "no version": Hostile(says("bei_version", value=""), "bei_version: it has 0 characters"),
    "no library": Hostile(says("source", "transformers", value=""), "source.transformers: it has 0 characters"),
    "no target": Hostile(says("target", value=""), "target is ''"),
    "a target that is a path": Hostile(says("target", value="../cpu"), "target is '../cpu', which is no name"),
    "an unknown precision": Hostile(says("precision", value="fp13"), "precision is 'fp13', and must be one of fp32"),
    "a precision of another target": Hostile(
        says_all(target="cpu", precision="fp8"),
        "precision is fp8, which the target cpu does not have: fp32, bf16, int8",
    ),
    "more files than are held open": Hostile(many, "files has 251 entries, more than the 250"),
    "no precision": Hostile(says("precision", value=""), "precision is ''"),
    "layers below zero": Hostile(says("spec", "num_layers", value=-1), "spec.num_layers is -1"),
    "no vocabulary": Hostile(says("spec", "vocab_size", value=0), "spec.vocab_size is 0"),
    "a vocabulary beyond int32": Hostile(says("spec", "vocab_size", value=10**12), "spec.vocab_size is 1000000000000"),
    "a width below zero": Hostile(says("spec", "hidden_size", value=-8), "spec.hidden_size is -8"),
    "no tasks": Hostile(says("tasks", value=[]), "tasks is empty"),
    "an unknown task": Hostile(
        says("tasks", value=["embed", "exec"]), "tasks has 'exec', and each must be one of embed"
    ),
    "a task twice": Hostile(says("tasks", value=["embed", "embed"]), "tasks has 'embed' twice"),
    "a task without its output": Hostile(says("tasks", value=["embed", "rerank"]), "the task rerank reads logits"),
    "no outputs": Hostile(says("outputs", value=[]), "reads embedding, which the engine does not give"),
    "an output twice": Hostile(says("outputs", value=[output("embedding")] * 2), "outputs has 'embedding' twice"),
    "an output without a name": Hostile(says("outputs", value=[output("embedding"), output("")]), "no name of an out"),
    "an output that is a path": Hostile(says("outputs", value=[output("embedding"), output("../x")]), "no name of an"),
    "width 0": Hostile(says("outputs", 0, "dimension", value=0), "embedding has the dimension 0"),
    "width -8": Hostile(says("outputs", 0, "dimension", value=-8), "embedding has the dimension -8"),
    "width 10^12": Hostile(says("outputs", 0, "dimension", value=10**12), "embedding has the dimension 1000000000000"),
    "embeddings a token": Hostile(says("outputs", 0, "per_token", value=True), "a row a sequence, not a token"),
    "token embeddings a sequence": Hostile(kind("embed_tokens", "token_embedding"), "a row a token, not a sequence"),
    # What belongs to an output.
    "embedding without its output": Hostile(
        says_all(tasks=["embed_sparse"], outputs=[output("sparse")]), "embedding and the output of this name"
    ),
    "an output without embedding": Hostile(says("embedding", value=None), "embedding and the output of this name"),
    "vectors of no components": Hostile(
        says("embedding", "matryoshka_dimensions", value=[4, 0]), "matryoshka_dimensions has 0"
    ),
    **{
        f"bytes of steps of {value}": Hostile(says("embedding", "int8_largest", value=value), "int8_largest is")
        for value in (-1.0, 0.0, 1e-320, 1e-30, 1e30)
    },
    "scores without labels": Hostile(kind("classify", "logits", 2), "2 columns, and classification has no labels"),
    "more labels than scores": Hostile(
        kind("classify", "logits", 2, classification=labelled(3)), "2 columns, and classification has 3 labels"
    ),
    "labels without scores": Hostile(says("classification", value=labelled(2)), "and no output has scores"),
    "a template without a reranker": Hostile(says("rerank_template", value=TEMPLATE), "the model does not rerank"),
    "a template without a document": Hostile(
        kind(
            "rerank",
            "logits",
            1,
            classification=labelled(1),
            rerank_template={**TEMPLATE, "body": "{query}"},
        ),
        r"has no \{document\}",
    ),
    "a default prompt that is not there": Hostile(says("default_prompt_name", value="q"), "is not among the prompts"),
    "a prompt that a terminal obeys": Hostile(says("prompts", value={"\x1b]0;x\x07": ""}), "which cannot be printed"),
    "a role of no tokens": Hostile(says("roles", value={"query": {**ROLE, "max_tokens": 0}}), "has max_tokens 0"),
    "a role beyond the longest text": Hostile(
        says("roles", value={"query": {**ROLE, "expansion": {**EXPANSION, "num_tokens": 10**9}}}), "beyond max_seq_len"
    ),
    "a role of a token below zero": Hostile(
        says("roles", value={"query": {**ROLE, "expansion": {**EXPANSION, "token_id": -1}}}), "in no vocabulary"
    ),
    "a role with padding below zero": Hostile(
        says("roles", value={"query": {**ROLE, "expansion": {**EXPANSION, "padding_id": -1}}}), "in no vocabulary"
    ),
    "a role that skips what cannot be": Hostile(
        says("roles", value={"query": {**ROLE, "skip_ids": [-5]}}), "skips a token id that is negative or too large"
    ),
    "a role with a table of dense vectors": Hostile(
        says("roles", value={"query": {**ROLE, "table": True}}),
        "a table of weights, and the model gives no sparse vectors",
    ),
    "a role with a table that is not there": Hostile(
        kind("embed_sparse", "sparse", roles={"query": {**ROLE, "table": True}}), "files has no token_weights.npy"
    ),
    "a table larger than its vocabulary": Hostile(large_table, "which bei does not read: it has"),
    "a route that a terminal obeys": Hostile(
        says("routes", value={"default": "document", "absent": ["\x1b]0;x\x07"]}), "routes: .* cannot be printed"
    ),
    "a default route that is absent": Hostile(
        says("routes", value={"default": "query", "absent": ["query"]}), "the default route 'query' is absent"
    ),
    "a profile with its most below its least": Hostile(
        plan({**PROFILE, "tokens": [64, 8, 1]}), "profile 'latency' has tokens 64, 8, 1"
    ),
    "a profile of nothing": Hostile(plan({**PROFILE, "longest": [0, 0, 0]}), "has longest 0, 0, 0"),
    "a profile twice": Hostile(plan(PROFILE, PROFILE), "has 'latency' twice"),
    "a package that reads no text": Hostile(package(inputs=["slot_ids"]), "have no input_ids"),
    "a package that reads a text twice": Hostile(package(inputs=["input_ids"] * 2), "has 'input_ids' twice"),
    "a package of less than nothing": Hostile(package(weight_bytes=-1), "has weight_bytes -1"),
    "a package for a CUDA that a terminal obeys": Hostile(package(cuda="\x1b[31m13"), "cannot be printed"),
    "a capability that a terminal obeys": Hostile(
        says("engine", "capabilities", value=["\x1b[31mBF16"]), "characters that cannot be printed"
    ),
    # The certificate.
    "NaN in the canary": Hostile(
        raw(lambda content: content.replace(b'"canary_row": [', b'"canary_row": [NaN,', 1), CERTIFICATE),
        "cannot be read",
    ),
    "null in the canary": Hostile(certificate("canary_row", 0, value=None), "cannot be read"),
    "a canary of another width": Hostile(certificate("canary_row", value=[1.0]), "1 components, and embedding has 8"),
    "a canary of nothing": Hostile(certificate("canary_output", value="logits"), "which the engine does not give"),
    "a cosine of 2": Hostile(certificate("outputs", 0, "cosine_mean", value=2.0), "cosine_mean of embedding is 2"),
    "a threshold of 7": Hostile(certificate("thresholds", "p1", value=7.0), "the threshold p1 is 7"),
    "an overlap of 2": Hostile(certificate("outputs", 0, "ranking_overlap", value=2.0), "ranking_overlap or max_abs"),
    "a difference below zero": Hostile(
        certificate("outputs", 0, "max_abs_difference", value=-1.0), "invalid ranking_overlap or max_abs_difference"
    ),
    "passed although it failed": Hostile(
        certificate("outputs", 0, "failures", value=["mean"]), "passed is true, which"
    ),
    "failed for no reason": Hostile(certificate("passed", value=False), "passed is false, which"),
    "passed on nothing": Hostile(certificate("outputs", value=[]), "lacks texts, outputs or thresholds"),
    "passed without thresholds": Hostile(certificate("thresholds", value=None), "lacks texts, outputs or thresholds"),
    "another kind than the manifest's": Hostile(certificate("kind", value="self-consistency"), "the manifest says ref"),
    "more texts than there are": Hostile(certificate("num_texts", value=5), "it compares 5 of 1 texts"),
    "texts below zero": Hostile(certificate("num_texts", value=-1), "it compares -1 of 1 texts"),
    "no worst text": Hostile(certificate("outputs", 0, "worst_texts", value=[]), "has no worst_texts"),
    "figures of an output that is not there": Hostile(
        certificate("outputs", 0, "output", value="logits"), "figures for 'logits', which the engine does not give"
    ),
    # The tokenizer: whoever inspects does not read it.
    "tokenizer nested deep": Hostile(
        raw(lambda _: nested(100_000), TOKENIZER), "is not a readable tokenizer", command="serve"
    ),
    "tokenizer of no UTF-8": Hostile(
        raw(lambda content: content.replace(b"hello", b"\xff\xfe", 1), TOKENIZER),
        "is not a readable tokenizer",
        command="serve",
    ),
    "tokenizer of a larger model": Hostile(
        raw(lambda content: with_id(content, "hello", 10**6), TOKENIZER), "its ids go up to 1000000", command="serve"
    ),
    **{
        f"tokenizer that leaves out texts, {form}": Hostile(
            raw(partial(without_template, form=form), TOKENIZER), "its template leaves a text out", command="serve"
        )
        for form in ("single", "pair")
    },
    "tokenizer that is a list": Hostile(raw(lambda _: b"[]", TOKENIZER), "is not a readable token", command="serve"),
}
