"""Signed with one command, served by another: ``bei sign`` and ``bei serve --require-signature``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import httpx

from bei.artifact.manifest import MANIFEST, Artifact
from bei.artifact.signature import SIGNATURE
from bei.artifact.signing_keys import fingerprint, openssh_line
from tests.e2e import process
from tests.e2e.process import DEADLINE_S, serve
from tests.e2e.test_bad_start import edit, fails
from tests.support.hostile_artifacts import says_all
from tests.support.keys import make_keys


def test_an_artifact_is_signed_and_then_served_where_a_signature_is_required(
    tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    ours, theirs, folder = make_keys(tmp_path, "ours"), make_keys(tmp_path, "theirs"), tmp_path / "signed"
    shutil.copytree(tiny.path, folder)
    trusted = tmp_path / "trusted"
    trusted.write_text(f"{openssh_line(ours.raw)} release@ci\n{theirs.public.read_text()}")
    required = {**env, "BEI_REQUIRE_SIGNATURE": str(trusted)}
    assert "is not signed" in fails(["serve", folder], required, tmp_path)
    signing = process.run(["sign", folder, "--key", ours.private], env, tmp_path)
    assert signing.stdout == f"{folder} is signed by {fingerprint(ours.raw)}\n", signing
    with serve([folder], required, tmp_path) as server:
        found = httpx.get(f"{server.url}/info", timeout=DEADLINE_S).json()["signature"]
        assert found == {"algorithm": "ed25519", "key": fingerprint(ours.raw), "checked": True, "trusted": True}
    only_theirs = ["serve", folder, "--require-signature", theirs.public]
    assert f"is signed by {fingerprint(ours.raw)}" in fails(only_theirs, env, tmp_path)
    says_all(name="renamed")(folder)
    edit(folder / SIGNATURE, digest=json.loads((folder / MANIFEST).read_text())["digest"])
    assert "is not valid" in fails(["serve", folder], env, tmp_path), "although nothing is required"
