"""Files that settings name are tried before a build, and only tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.server.start_checks import check_named_files
from tests.support.keys import make_keys
from tests.support.tls_certificates import make_authority


def test_settings_that_name_no_files_are_good() -> None:
    check_named_files(ServeConfig())


def test_good_files_pass_and_nothing_is_logged_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What reads them at the start proper warns of short keys and of dates."""
    keys, pair = tmp_path / "keys.yaml", make_authority(tmp_path)
    keys.write_text("search: short")
    config = ServeConfig(
        api_keys_file=str(keys),
        tls_cert=str(pair.cert),
        tls_key=str(pair.key),
        require_signature=(str(make_keys(tmp_path).public),),
    )
    with caplog.at_level("DEBUG"):
        check_named_files(config)
    assert caplog.records == []


def test_keys_of_the_environment_are_tried_too() -> None:
    with pytest.raises(ConfigError, match="Entry 1 of BEI_API_KEYS"):
        check_named_files(ServeConfig(api_keys=("a b",)))


def test_a_pipe_of_the_shell_is_left_for_who_reads_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, make_keys(tmp_path).public.read_bytes())
        check_named_files(ServeConfig(require_signature=(f"/dev/fd/{reading}",)))
        assert os.read(reading, 100_000).startswith(b"-----BEGIN PUBLIC KEY-----")
    finally:
        os.close(reading)
        os.close(writing)
