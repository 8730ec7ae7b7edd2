"""Signed with one command, served by another: ``bei sign`` and ``bei serve --require-signature``."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest

from bei.artifact import store
from bei.artifact.manifest import MANIFEST, Artifact
from bei.artifact.signature import SIGNATURE
from bei.artifact.signing_keys import fingerprint, openssh_line
from tests.e2e import process
from tests.e2e.children import children
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.e2e.swapping_server import PLACE, put_in_place, save_build
from tests.e2e.test_bad_start import edit, fails
from tests.support.keys import make_keys
from tests.support.replaced_files import CLOSED, OPENED, WAYS, replaced_when
from tests.support.spoilt_artifacts import says_all


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


ROUNDS = 20
# What the engines of signed weights answer. Others answer one more: a canary would not find that.
SIGNED = range(10, 12 + 2 * ROUNDS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["swapping_server", "processes_server"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_replaced_while_they_are_loaded_are_never_run(
    way: str, program: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    """At the start, and at twenty hot swaps; in one process, and in several, whose engine is then started again."""
    keys, folder = make_keys(tmp_path, "ours"), tmp_path / "tiny"
    weights = folder / "engine" / "fake.bin"

    def replaced(number: int) -> AbstractContextManager[Callable[[], bool]]:
        new = save_build(tmp_path / "new", number)
        store.sign(new, keys.key)
        if folder.exists():
            put_in_place(new.path, folder)
        else:
            new.path.rename(folder)
        event = OPENED if number % 4 else CLOSED  # while it is hashed; when it was hashed
        return replaced_when(event, weights, lambda: WAYS[way](weights, str(number + 1).encode()))

    several = ["--http-workers", 2] if program == "processes_server" else []
    trusted = ["--require-signature", keys.public]
    command = [sys.executable, "-m", f"tests.e2e.{program}", folder, *trusted, *several]
    answered: list[float] = []
    with ExitStack() as stack:
        with replaced(SIGNED[1]) as is_done:
            server = stack.enter_context(Server(command, env, tmp_path))
            wait_until(is_done, "the weights are replaced")
        for number in SIGNED[2:]:
            with replaced(number) as is_done:
                server.send_signal(signal.SIGHUP)
                server.wait_for_log("is served from the artifact|cannot take its place: artifact_hash_mismatch")
                wait_until(is_done, "the weights are replaced")
            answered += [server.embed([[value]]).json()["data"][0]["embedding"][PLACE] for value in range(4)]
        if several:
            children(server)["engine-0"].kill()
            server.wait_for_log("engine-0 is ready again")
            answered += [server.embed([[value]]).json()["data"][0]["embedding"][PLACE] for value in range(4)]
    assert {*answered} <= {*SIGNED}
    assert len({*answered}) >= ROUNDS / 2, "those that were replaced when they were hashed are served"
