"""API keys as they are written down, and what a wrong file is told without a key in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.errors import ConfigError
from bei.server.auth.key_file import KeySpec, key_specs

SECRET = "s3cr3t-0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def specs(file: Path, content: str | bytes, *entries: str) -> list[KeySpec]:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return key_specs(str(file), entries)


def fails(file: Path, content: str | bytes, *entries: str) -> str:
    with pytest.raises(ConfigError) as caught:
        specs(file, content, *entries)
    message = str(caught.value)
    assert SECRET not in message
    assert "\n" not in message
    assert caught.value.__cause__ is None  # a traceback would quote the file
    return message


def test_a_key_alone_a_list_of_them_and_all_options(file: Path) -> None:
    found = specs(
        file,
        """
        search: first-key
        both: [old-key, new-key]
        crawler:
          key: [a, b]
          lane: bulk
          may_raise_lane: true
          requests_per_second: 20
          tokens_per_second: 0.5
        query: {key: "0123", lane: interactive}
        """,
    )
    assert found == [
        KeySpec("search", ("first-key",)),
        KeySpec("both", ("old-key", "new-key")),
        KeySpec("crawler", ("a", "b"), "bulk", True, 20.0, 0.5),
        KeySpec("query", ("0123",), "interactive"),
    ]
    assert "first-key" not in repr(found)


def test_json_is_read_too(file: Path) -> None:
    assert specs(file, '{"search": {"key": "k", "lane": "bulk"}}') == [KeySpec("search", ("k",), "bulk")]


def test_keys_of_the_environment_have_names_and_may_be_several_of_one() -> None:
    found = key_specs(None, ["search:old", "search:new", "x:a:b", "nameless"])
    assert found == [
        KeySpec("search", ("old", "new")),
        KeySpec("x", ("a:b",)),
        KeySpec("default", ("nameless",)),
    ]


def test_keys_of_file_and_environment_are_all_good(file: Path) -> None:
    assert [spec.name for spec in specs(file, "search: a", "crawler:b")] == ["search", "crawler"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a table of names"),
        ("{}", "must be a table of names"),
        (f"- {SECRET}", "must be a table of names"),
        (SECRET, "must be a table of names"),
        (f"a: {SECRET}\na: other", r"a name twice in one table \(line 2\)"),
        (f"a: {{key: x, key: {SECRET}}}", "a name twice"),
        (f"a: {SECRET}\n\tb: {SECRET}", r"are no YAML \(line 2\)"),
        (f"a: [{SECRET}", "are no YAML"),
        (f"a: !!python/name:{SECRET}", "are no YAML"),
        (f"a: *{SECRET}", "are no YAML"),
        (f"a: !!timestamp {SECRET}", "are no YAML"),
        (f"a: {SECRET}\xff".encode("latin-1"), "no YAML in UTF-8"),
        ("a: " + "[" * 600, "are no YAML"),
        (f"'a b': {SECRET}", "the name of entry 1 cannot be one"),
        (f"{SECRET * 4}: a", "the name of entry 1 cannot be one"),
        (f"no: {SECRET}", "the name of entry 1 cannot be one"),
        ("a: 123456789", "key must be a key or a list.*quotes"),
        ("a:", "key must be a key"),
        ("a: []", "key must be a key"),
        (f"a: [{SECRET}, 5]", "key must be a key"),
        ("a: 'with space'", "key must be a key"),
        ("a: ümläut", "key must be a key"),
        ("a: {lane: bulk}", "key must be a key"),
        (f"a: {{key: {SECRET}, lan: bulk}}", "the option lan is unknown, is it lane: there are key, lane"),
        (
            f"a: {{key: {SECRET}, requests_per_sec: 1}}",
            "the option requests_per_sec is unknown, is it requests_per_second",
        ),
        (f"a: {{key: {SECRET}, {SECRET}: 1}}", "an option is unknown"),
        (f"a: {{key: {SECRET}, lane: fast}}", "a: lane must be interactive or bulk"),
        (f"a: {{key: {SECRET}, lane: [bulk]}}", "a: lane must be interactive or bulk"),
        (f"a: {{key: {SECRET}, may_raise_lane: maybe}}", "may_raise_lane must be true or false"),
        (f"a: {{key: {SECRET}, may_raise_lane: true}}", "may_raise_lane is for keys whose lane is bulk"),
        *(
            (f"a: {{key: {SECRET}, {name}: {value}}}", f"{name} must be a number above 0")
            for name in ("requests_per_second", "tokens_per_second")
            for value in ("0", "-1", ".nan", ".inf", "true", "many")
        ),
        (f"a: {SECRET}\nb: {SECRET}", r"under several names or twice \(a and b\)"),
        (f"a: [{SECRET}, {SECRET}]", "under several names or twice"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong_and_never_a_key(file: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specs(file, content)
    fails(file, content)


@pytest.mark.parametrize("entry", ["", "a:", ":x", "a b:x", f"{SECRET} x", f"a:{SECRET} x"])
def test_a_wrong_entry_of_the_environment_is_named_by_its_place(entry: str) -> None:
    with pytest.raises(ConfigError, match="Entry 2 of BEI_API_KEYS") as caught:
        key_specs(None, ["a:x", entry])
    assert SECRET not in str(caught.value)


def test_a_name_of_both_sources_is_refused(file: Path) -> None:
    assert "The API key search is in the file and in BEI_API_KEYS" in fails(file, "search: a", f"search:{SECRET}")


def test_a_key_of_both_sources_is_refused(file: Path) -> None:
    assert "(search and crawler)" in fails(file, f"search: {SECRET}", f"crawler:{SECRET}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml cannot be read: No such file"):
        key_specs(str(tmp_path / "nowhere.yaml"), ())
    with pytest.raises(ConfigError, match="cannot be read: it is a directory"):
        key_specs(str(tmp_path), ())
