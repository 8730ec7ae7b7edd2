"""Output of ``bei inspect``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from bei.artifact import store
from bei.artifact.manifest import CERTIFICATE, MANIFEST, Artifact, Tokenization
from bei.artifact.sides import Role, Routes
from bei.cli.inspect_artifact import as_json, as_table
from bei.core import Expansion
from tests.bei.artifact.test_token_weights import save_table
from tests.support.artifacts import save_artifact
from tests.support.keys import make_keys


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(
        tmp_path / "artifact",
        name="org/tiny",
        prompts={"query": "query: ", "passage": "[b]passage[/b]: "},
        default_prompt_name="query",
        embedding={"matryoshka_dimensions": [2, 4]},
        roles={
            "query": Role(max_tokens=8, expansion=Expansion(5, 8, attended=False), skip_ids=[]),
            "document": Role(max_tokens=300, expansion=None, skip_ids=[4, 6]),
        },
    )


def rows_of(table: str) -> dict[str, str]:
    """Values by name; what goes on in the next line is joined."""
    rows: dict[str, str] = {}
    name = ""
    for line in filter(str.strip, table.splitlines()):
        if line[1] != " ":
            name, _, value = line.strip().partition("  ")
            rows[name] = value.strip()
        else:
            rows[name] += f" {line.strip()}"
    return rows


def test_the_table_shows_model_engine_and_certificate(artifact: Artifact) -> None:
    rows = rows_of(as_table(artifact))
    assert all(len(line) <= 80 for line in as_table(artifact).splitlines())
    assert rows["name"] == "org/tiny"
    assert rows["architecture"] == "BertModel, 1 layers, hidden 8"
    assert rows["outputs"] == "embedding [8]"
    assert rows["embeddings"] == "mean pooling, unit length"
    assert rows["dimensions"] == "2, 4"
    assert rows["prompt query (default)"] == "'query: '"
    assert rows["prompt passage"] == "'[b]passage[/b]: '"  # rich's markup is off
    assert rows["query tokens"] == "up to 8; filled up to 8 with token 5, which no other token sees"
    assert rows["document tokens"] == "up to 16; vectors of 2 tokens left out"
    assert rows["target"] == "fake, fp32"
    assert "route" not in rows
    assert rows["needs"] == "cpu: nothing special"
    assert rows["max_seq_len"] == "16"
    assert rows["files"].startswith("4, ")
    assert rows["certificate"] == "reference, passed on 1 texts"
    assert rows["needed cosines"] == "mean 0.99, p1 0.9, min 0.5"
    assert rows["worst text"] == "1.000000: 'the worst text'"


def test_how_texts_become_tokens_is_shown(artifact: Artifact) -> None:
    assert re.search(r"tokenizer +tokenizer\.json, by none\n", as_table(artifact))
    other = Tokenization(
        library="transformers 5", tokenizer_class="Own", truncation_side="left", splits_special_tokens=True
    )
    table = as_table(
        msgspec.structs.replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, tokenization=other))
    )
    assert "Own, by transformers 5; a text that is too long loses its beginning" in " ".join(table.split())
    assert "special tokens of a text are split" in " ".join(table.split())


def test_what_the_build_was_told_of_attention_and_adapters_is_shown(artifact: Artifact) -> None:
    spec = msgspec.structs.replace(artifact.manifest.spec, attention_asked=True, adapter="retrieval")
    manifest = msgspec.structs.replace(artifact.manifest, spec=spec)
    table = as_table(msgspec.structs.replace(artifact, manifest=manifest))
    assert re.search(r"attention +bidirectional \(as bei build --attention said\)", table)
    assert re.search(r"adapter +retrieval", table)
    assert "adapter" not in as_table(artifact)


def test_the_table_says_what_is_looked_up_and_what_other_artifacts_read(tmp_path: Path) -> None:
    made = save_table(tmp_path / "table", routes=Routes(default="document", absent=["image", "audio"]))
    rows = rows_of(as_table(made))
    assert rows["query tokens"] == "up to 6; sparse vectors from a table of weights"
    assert rows["route"] == "document unless a request says it; not in this artifact: image, audio"


def test_the_table_has_no_escape_sequences_and_no_trailing_blanks(artifact: Artifact) -> None:
    table = as_table(artifact)
    assert "\x1b" not in table
    assert all(line == line.rstrip() for line in table.splitlines())


def test_json_is_the_manifest_and_the_certificate(artifact: Artifact) -> None:
    content = json.loads(as_json(artifact))
    assert set(content) == {"manifest", "certificate", "signature"}
    assert content["signature"] is None
    assert content["manifest"] == json.loads((artifact.path / MANIFEST).read_text())
    assert content["certificate"] == json.loads((artifact.path / CERTIFICATE).read_text())


def test_who_has_signed_it_is_shown(artifact: Artifact, tmp_path: Path) -> None:
    assert re.search(r"signed by +nobody", as_table(artifact))
    signed = store.sign(artifact, make_keys(tmp_path).key)
    assert signed.signed is not None
    key = signed.signed.key
    assert json.loads(as_json(signed))["signature"] == {"algorithm": "ed25519", "key": key, "checked": True}
    assert rows_of(as_table(signed))["signed by"] == f"{key}, ed25519"
    unchecked = msgspec.structs.replace(signed, signed=msgspec.structs.replace(signed.signed, is_checked=False))
    assert rows_of(as_table(unchecked))["signature"] == "NOT CHECKED: pip install 'bei[sign]'"
    assert json.loads(as_json(unchecked))["signature"]["checked"] is False


def test_an_artifact_that_was_not_verified_says_so(artifact: Artifact) -> None:
    certificate = msgspec.structs.replace(
        artifact.certificate,
        kind="none",
        reference="none",
        num_texts=0,
        thresholds=None,
        outputs=[],
        passed=False,
    )
    again = store.save(artifact.path, artifact.manifest, certificate)
    assert again.manifest.verification == "none"
    table = as_table(again)
    assert "NOT VERIFIED: built with --no-verify" in table
    assert "needed cosines" not in table
    assert json.loads(as_json(again))["certificate"]["kind"] == "none"
