"""What an operator writes: settings, API keys, keys that sign, TLS; and results and tables of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from random import Random

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from bei.artifact.signing_keys import openssh_line, private_key, trusted_keys
from bei.cli.bench.result import read_result
from bei.cli.simulate.devices import read_table
from bei.cli.simulate.trace import read_trace
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.scheduler.cost_model import CostModel
from bei.server.auth.key_file import key_specs
from bei.server.http.tls import TLS
from bei_build.config import BuildConfig
from tests.bei.cli.bench.results import result_of
from tests.fuzz.mutation import changed_body, changed_bytes, changed_lines
from tests.fuzz.trial import Trial
from tests.support.artifacts import LIMITS
from tests.support.keys import make_keys
from tests.support.tls_certificates import make_authority, make_certificate

_SERVE = """
models: [minilm, reranker]
host: 0.0.0.0
port: 8000
max-client-batch-size: 32
body_timeout: 2.5
tls_cert: server.crt
tls_key: server.key
api_keys: ["search:first-key", second-key]
cors_origins: ["https://a.example"]
access_log: true
dialect: tei
root_path: /bei
"""
_BUILD = """
model: minilm
target: cpu
precision: int8
calibration_size: 128
calibration_method: percentile
calibration_percentile: 99.9
max-seq-len: 512
prompts: {query: "query: ", passage: "passage: "}
score_tokens: [no, yes]
verify: true
min_cosine: 0.99
"""
_KEYS = """
search: first-key
both: [old-key, new-key]
crawler:
  key: [a, b]
  lane: bulk
  may_raise_lane: true
  requests_per_second: 20
  tokens_per_second: 0.5
query: {key: "0123", lane: interactive}
"""


def settings(folder: Path) -> Trial:
    """The YAML file of ``bei serve`` or ``bei build``."""
    file = folder / "settings.yaml"

    def trial(random: Random) -> None:
        config: type[ServeConfig] | type[BuildConfig] = random.choice((ServeConfig, BuildConfig))
        file.write_bytes(changed_lines(random, _SERVE if config is ServeConfig else _BUILD))
        load(config, {}, str(file), env={})

    return trial


def variables(_: Path) -> Trial:
    """BEI_* variables, of any setting."""

    def trial(random: Random) -> None:
        config: type[ServeConfig] | type[BuildConfig] = random.choice((ServeConfig, BuildConfig))
        given: dict[str, str] = {"BEI_MODEL": "minilm"} if config is BuildConfig else {}
        for field in random.sample(fields(config), k=random.randrange(1, 4)):
            value = changed_lines(random, str(field.default)).decode(errors="surrogateescape").replace("\0", "")
            given[f"BEI_{field.name.upper()}"] = value
        load(config, {}, env=given)

    return trial


def api_keys(folder: Path) -> Trial:
    """The file of API keys, and the variable."""
    file = folder / "keys.yaml"

    def trial(random: Random) -> None:
        file.write_bytes(changed_lines(random, _KEYS))
        entry = changed_bytes(random, b"other:third-key").decode(errors="surrogateescape")
        key_specs(str(file), [entry] if random.random() < 0.3 else [])

    return trial


_PEM_WORDS = (
    b"-----BEGIN PRIVATE KEY-----",
    b"-----END PRIVATE KEY-----",
    b"ENCRYPTED ",
    b"RSA ",
    b"ssh-ed25519 ",
    b"=",
    b"ssh-rsa AAAA",
)


def _of_key(folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Public and private keys in all forms that are read."""
    pair = make_keys(folder)
    public = pair.key.public_key()
    line = openssh_line(pair.raw).encode() + b" somebody@example\n"
    spki = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    private = [
        pair.private.read_bytes(),
        pair.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        make_keys(folder, "locked", passphrase="open").private.read_bytes(),
    ]
    return [spki, line, b"# keys\n" + spki + line], private


def trusted(folder: Path) -> Trial:
    """Files of trusted public keys."""
    public, private = _of_key(folder)
    file = folder / "trusted"

    def trial(random: Random) -> None:
        key = random.choice((*public, private[0]))
        file.write_bytes(key if random.random() < 0.2 else changed_bytes(random, key, _PEM_WORDS))
        trusted_keys([str(file)])

    return trial


def signing_key(folder: Path) -> Trial:
    """The file of a private key, and that of its passphrase."""
    public, private = _of_key(folder)
    file, secret = folder / "private", folder / "secret"

    def trial(random: Random) -> None:
        key = random.choice((*private, public[0]))
        file.write_bytes(key if random.random() < 0.2 else changed_bytes(random, key, _PEM_WORDS))
        secret.write_bytes(changed_bytes(random, b"open\n"))
        private_key(str(file), passphrase_file=str(secret) if random.random() < 0.3 else None)

    return trial


def tls(folder: Path) -> Trial:
    """Certificate, key and client authorities."""
    authority = make_authority(folder)
    pair = make_certificate(folder, "server", authority)
    names = [folder / name for name in ("cert", "key", "ca")]
    good = [pair.cert.read_bytes(), pair.key.read_bytes(), authority.cert.read_bytes()]
    words = (*_PEM_WORDS, b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----")

    def trial(random: Random) -> None:
        at = random.randrange(3)
        for index, (name, content) in enumerate(zip(names, good, strict=True)):
            name.write_bytes(changed_bytes(random, content, words) if index == at else content)
        TLS(str(names[0]), str(names[1]), str(names[2]) if random.random() < 0.7 else None, 1.0)

    return trial


def results(folder: Path) -> Trial:
    """Results of ``bei bench`` that are compared, tables and traces of ``bei simulate``."""
    costs = CostModel(LIMITS, CostModel.assumed(LIMITS).coefficients).to_json()
    table = {"device": "L4", "model": "tiny", "source": "a page", "num_streams": 1, "costs": costs, "assumptions": []}
    result = json.loads(msgspec.json.encode(result_of()))
    lines = [{"at_s": 0.5, "tokens": [3, 4]}, {"tokens": [9]}]
    readers: Mapping[str, tuple[Callable[[Path], object], list[object]]] = {
        "result": (read_result, [result]),
        "table": (lambda path: read_table(str(path)), [table, costs]),
        "trace": (read_trace, lines),
    }

    def trial(random: Random) -> None:
        name = random.choice([*readers])
        read, seeds = readers[name]
        file = folder / f"{name}.json"
        parts = [changed_body(random, seeds) for _ in range(random.randrange(1, 3) if name == "trace" else 1)]
        file.write_bytes(b"\n".join(parts))
        read(file)

    return trial
