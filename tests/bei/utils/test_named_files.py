"""Files that a person names: bounded, regular, never waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.signing_keys import private_key, trusted_keys
from bei.cli.bench.target import BenchTarget, TlsPlan, key_of
from bei.cli.bench.texts import lines_of
from bei.cli.simulate.devices import read_table
from bei.cli.simulate.trace import read_trace
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei.server.auth.key_file import key_specs
from bei.server.http.tls import TLS
from bei.utils.named_files import named_bytes
from bei_build.quantization.calibration_texts import calibration_texts
from bei_build.targets.tensorrt.timing_cache import check_writable
from tests.support.tls_certificates import make_authority

Reader = Callable[[Path], Any]

_HTTPS = BenchTarget("a", is_https=True, host="127.0.0.1", port=1)


def readers(tmp_path: Path) -> dict[str, Reader]:
    """What reads each named file, by its setting."""
    pair = make_authority(tmp_path)
    return {
        "config": lambda file: load(ServeConfig, {}, str(file), env={}),
        "api_keys_file": lambda file: key_specs(str(file), ()),
        "tls_cert": lambda file: TLS(str(file), str(pair.key), None, 1.0),
        "tls_key": lambda file: TLS(str(pair.cert), str(file), None, 1.0),
        "tls_client_ca": lambda file: TLS(str(pair.cert), str(pair.key), str(file), 1.0),
        "sign": lambda file: private_key(str(file)),
        "sign_passphrase_file": lambda file: private_key("x", passphrase_file=str(file)),
        "require_signature": lambda file: trusted_keys([str(file)]),
        "calibration_data": lambda file: calibration_texts(str(file), None, 1, 0),
        "timing_cache": check_writable,
        "bench --texts": lines_of,
        "bench --api-key-file": lambda file: key_of(None, file),
        "bench --tls-ca": lambda file: TlsPlan(ca=str(file)).context_for(_HTTPS),
        "bench --tls-cert": lambda file: TlsPlan(cert=str(file)).context_for(_HTTPS),
        "bench --tls-key": lambda file: TlsPlan(cert=str(pair.cert), key=str(file)).context_for(_HTTPS),
        "simulate --trace": read_trace,
        "simulate --costs": lambda file: read_table(str(file)),
    }


SETTINGS = (
    *("config", "api_keys_file", "tls_cert", "tls_key", "tls_client_ca", "sign", "sign_passphrase_file"),
    *("require_signature", "calibration_data", "timing_cache", "bench --texts", "bench --api-key-file"),
    *("bench --tls-ca", "bench --tls-cert", "bench --tls-key", "simulate --trace", "simulate --costs"),
)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2_000_000_000)


@pytest.mark.parametrize("make", [os.mkfifo, endless, huge, Path.mkdir])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_no_bounded_regular_file_is_refused_at_once_by_name(
    setting: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    reader = readers(tmp_path)[setting]
    file = tmp_path / "named.txt"
    make(file)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            reader(file)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)  # a reader that waits must not keep the tests
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, ConfigError), error
    assert "named.txt" in str(error)
    assert any(reason in str(error) for reason in ("no regular file", "bytes, more than", "must be a file in"))


def test_all_settings_are_tried(tmp_path: Path) -> None:
    assert set(readers(tmp_path)) == set(SETTINGS)


def test_a_pipe_that_the_shell_has_opened_is_read_to_its_bound() -> None:
    for content, most in ((b"secret", 6), (b"secret", 5)):
        reading, writing = os.pipe()
        os.write(writing, content)
        os.close(writing)
        try:
            if len(content) <= most:
                assert named_bytes("The key", f"/dev/fd/{reading}", most, may_be_pipe=True) == content
            else:
                with pytest.raises(ConfigError, match="more than the 5 bytes"):
                    named_bytes("The key", f"/dev/fd/{reading}", most, may_be_pipe=True)
            with pytest.raises(ConfigError, match="no regular file"):
                named_bytes("The key", f"/dev/fd/{reading}", most)
        finally:
            os.close(reading)


def test_a_file_that_is_not_there_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The key .*absent cannot be read: No such file or directory\."):
        named_bytes("The key", tmp_path / "absent", 5)
