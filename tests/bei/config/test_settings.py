"""Sources of settings, their order, and errors for wrong values."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bei.config.settings import ServeConfig
from bei.config.sources import BUILD_SETTINGS, load
from bei.errors import ConfigError
from bei.utils.cpu_count import usable_cores
from bei.utils.ranges import Range
from bei_build.config import BuildConfig


@dataclass(frozen=True)
class EveryType:
    """One field of each type that configuration classes use."""

    text: str = "default"
    number: int = 1
    share: float = 0.1
    switch: bool = False
    texts: tuple[str, ...] = ()
    maybe_text: str | None = None
    maybe_number: int | None = None
    maybe_switch: bool | None = None


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> str:
        path = tmp_path / "settings.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("name", "in_file", "from_file", "in_env", "from_env", "flag"),
    [
        ("text", "filed", "filed", "environed", "environed", "flagged"),
        ("number", "2", 2, "3", 3, 4),
        ("share", "0.2", 0.2, "3e-1", 0.3, 0.4),
        ("share", "2", 2.0, "3", 3.0, 0.4),
        ("switch", "true", True, "off", False, True),
        ("switch", "no", False, "TRUE", True, False),
        ("texts", "[a, b]", ("a", "b"), "c,d", ("c", "d"), ("e",)),
        ("texts", "a", ("a",), "c", ("c",), ("e", "f")),
        ("maybe_text", "filed", "filed", "environed", "environed", "flagged"),
        ("maybe_text", "null", None, "environed", "environed", "flagged"),
        ("maybe_number", "2", 2, "3", 3, 4),
        ("maybe_switch", "true", True, "0", False, True),
    ],
)
def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    yaml_file: Any, name: str, in_file: str, from_file: object, in_env: str, from_env: object, flag: object
) -> None:
    file, env = yaml_file(f"{name}: {in_file}\n"), {f"BEI_{name.upper()}": in_env}
    assert getattr(load(EveryType, {}, None, {}), name) == getattr(EveryType(), name)
    assert getattr(load(EveryType, {}, file, {}), name) == from_file
    assert getattr(load(EveryType, {}, file, env), name) == from_env
    assert getattr(load(EveryType, {name: flag}, file, env), name) == flag


def test_sources_are_merged_setting_by_setting(yaml_file: Any) -> None:
    file = yaml_file("text: filed\nnumber: 2\nshare: 0.2\n")
    config = load(EveryType, {"share": 0.4}, file, {"BEI_NUMBER": "3", "HOME": "/root", "beinumber": "x"})
    assert config == EveryType(text="filed", number=3, share=0.4)


def test_the_environment_is_the_process_s_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEI_TEXT", "of the process")
    assert load(EveryType, {}).text == "of the process"


def test_a_key_of_the_file_may_be_spelt_like_its_flag(yaml_file: Any) -> None:
    assert load(EveryType, {}, yaml_file("maybe-number: 5"), {}).maybe_number == 5


def test_an_empty_file_sets_nothing(yaml_file: Any) -> None:
    assert load(EveryType, {}, yaml_file("# nothing yet\n"), {}) == EveryType()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("text", "5", "a text"),
        ("text", "null", "a text"),
        ("number", "1.5", "an integer"),
        ("number", "two", "an integer"),
        ("number", "true", "an integer"),
        ("number", "[1]", "an integer"),
        ("share", "much", "a number"),
        ("share", "true", "a number"),
        ("switch", "1", "true or false"),
        ("switch", "maybe", "true or false"),
        ("texts", "[1, 2]", "a list of texts"),
        ("texts", "{a: b}", "a list of texts"),
        ("maybe_number", "x", "an integer"),
    ],
)
def test_a_value_of_the_wrong_type_names_setting_source_and_type(
    yaml_file: Any, name: str, value: str, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=rf"Setting '{name}' \(file\) must be {wanted}"):
        load(EveryType, {}, yaml_file(f"{name}: {value}\n"), {})


@pytest.mark.parametrize(("name", "value"), [("number", "1.5"), ("share", "x"), ("switch", "2")])
def test_a_variable_that_cannot_be_parsed_names_the_environment(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"Setting '{name}' \(environment\)"):
        load(EveryType, {}, None, {f"BEI_{name.upper()}": value})


def test_an_empty_variable_is_to_be_unset() -> None:
    with pytest.raises(ConfigError, match=r"^BEI_PORT is empty: unset it, or set it to an integer\.$"):
        load(ServeConfig, {}, None, {"BEI_PORT": ""})


def test_an_unknown_key_names_its_source_and_the_nearest_known_one(yaml_file: Any) -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting 'prot' in the file\. Did you mean 'port'\?"):
        load(ServeConfig, {}, yaml_file("prot: 8000"), {})
    with pytest.raises(ConfigError, match=r"BEI_MAX_QUEUE in the environment\. Did you mean BEI_MAX_QUEUE_TOKENS\?"):
        load(ServeConfig, {}, None, {"BEI_MAX_QUEUE": "1"})
    with pytest.raises(ConfigError, match=r"BEI_MAX_SEQ_LENGTH in the environment\. Did you mean BEI_MAX_SEQ_LEN\?"):
        load(ServeConfig, {}, None, {"BEI_MAX_SEQ_LENGTH": "1"})
    with pytest.raises(ConfigError, match=r"'hots' in the flags\. Did you mean 'host'\?"):
        load(ServeConfig, {"hots": "x"}, None, {})


def test_an_unknown_key_like_no_other_gets_the_whole_list(yaml_file: Any) -> None:
    with pytest.raises(ConfigError, match="Known settings: text, number, share"):
        load(EveryType, {}, yaml_file("zzzzzz: 1"), {})


def test_of_many_settings_none_is_listed(yaml_file: Any) -> None:
    for env, file in (({"BEI_LOG_LEVEL": "debug"}, None), ({}, yaml_file("zzzzzz: 1"))):
        with pytest.raises(ConfigError, match=r"Unknown setting .* [Ss]ee docs/reference\.md\.$") as caught:
            load(ServeConfig, {}, file, env)
        assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("config_class", "text", "words"),
    [
        (
            ServeConfig,
            "pooling: mean",
            "'pooling' in the file is a setting of 'bei build': for what is built here set BEI_POOL",
        ),
        (
            ServeConfig,
            "model: x\nname: y",
            "The file is a recipe of 'bei build': give it to that as --config, and serve",
        ),
        (BuildConfig, "port: 1", "'port' in the file is a setting of 'bei serve': leave it out."),
    ],
)
def test_a_setting_of_the_other_command_says_of_which(
    config_class: type[Any], text: str, words: str, yaml_file: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}"):
        load(config_class, {}, yaml_file(text), {})


def test_variables_of_the_other_command_are_not_unknown() -> None:
    assert load(ServeConfig, {}, None, {"BEI_POOLING": "cls", "BEI_PORT": "1"}).port == 1
    assert load(BuildConfig, {"model": "x"}, None, {"BEI_PORT": "1", "BEI_POOLING": "cls"}).pooling == "cls"


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        "just text",
        "port: [1\nfoo: }",
        "a: b: c",
        b"\xff\xfe\x00",
        "\t- x",
        "!!python/object:os.system {}",
        "a: !!timestamp b",
    ],
)
def test_a_file_that_is_no_settings_file_is_a_configuration_error(yaml_file: Any, content: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load(EveryType, {}, yaml_file(content), {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("port: 1\napi_keys: [search:s3cr3t, 'crawler:s3cr3t", r"no YAML \(line 2\)"),
        ("api_keys: search: s3cr3t", r"no YAML \(line 1\)"),
        ("api_keys: *s3cr3t", r"no YAML \(line 1\)"),
        ("api_keys: !!timestamp s3cr3t", "no YAML"),
        ("port: 1\nlog-format: text\nport: 2", r"a setting twice in one table \(line 3\)"),
        ("log-format: text\nlog_format: json", "with - and with _"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong_and_never_a_secret(yaml_file: Any, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(ServeConfig, {}, yaml_file(content), {})
    assert "s3cr3t" not in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The configuration file .*absent.yaml cannot be read: No such file"):
        load(EveryType, {}, str(tmp_path / "absent.yaml"), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 65536}, "port must be from 0 to 65,535, not 65,536"),
        ({"port": -1}, "port must be from 0 to 65,535, not -1"),
        ({"engine_threads": -1}, "engine_threads must be from 0 to 4,096, not -1"),
        ({"engine_streams": -1}, "engine_streams must be from 0 to 256, not -1"),
        ({"graph_megabytes": -1}, "graph_megabytes must be from 0 to 1,000,000 megabytes"),
        ({"gpu_megabytes": 0}, "gpu_megabytes must be from 1 to 1,000,000 megabytes"),
        ({"tune": "sometimes"}, "tune must be one of auto, off, force, not 'sometimes'"),
        ({"tokenizer_threads": 0}, "tokenizer_threads must be from 1 to 1,024"),
        ({"max_client_batch_size": 0}, "max_client_batch_size must be from 1 to"),
        ({"payload_limit": 0}, "payload_limit must be from 1 to 1,000,000,000,000 bytes"),
        ({"answer_memory": 10}, "answer_memory 10 could never hold an answer of answer_limit 256000000 bytes"),
        ({"max_queue_tokens": 0}, "max_queue_tokens must be from 1 to"),
        ({"bulk_share": 1.0}, "bulk_share must be at least 0 and below 1"),
        ({"bulk_max_wait": -0.5}, "bulk_max_wait must be from 0 to 604,800 seconds"),
        ({"step_cap_ms": float("nan")}, "step_cap_ms must be from 0 to 3,600,000 milliseconds, not nan"),
        ({"engine_threads": 2, "engine_streams": 3}, "raise the second or lower the first"),
        ({"cache_max_size": "much"}, "cache_max_size must be a size such as 50GB, 500MB or 20GiB, not 'much'"),
        ({"cache_max_size": "0"}, "cache_max_size 0 would keep nothing: give a size, or unlimited"),
        ({"require_signature": ()}, "require_signature is set and names no key"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**settings)


def test_engines_get_the_options_that_somebody_chose() -> None:
    assert ServeConfig().engine_options == {}
    chosen = ServeConfig(engine_threads=2, engine_streams=2, graph_megabytes=0, gpu_megabytes=9000)
    assert chosen.engine_options == {"num_threads": 2, "cuda_graphs": 0, "memory": 9000}


def test_the_cache_has_a_bound_unless_it_is_unlimited() -> None:
    assert ServeConfig().cache_max_bytes == 50 * 10**9
    assert ServeConfig(cache_max_size="1.5GiB").cache_max_bytes == 3 * 2**29
    assert ServeConfig(cache_max_size="unlimited").cache_max_bytes is None


def test_the_default_leaves_a_core_to_the_engine() -> None:
    assert 1 <= ServeConfig().tokenizer_threads <= max(1, usable_cores() - 1)


@pytest.mark.parametrize("config_class", [ServeConfig, BuildConfig])
def test_every_number_has_a_range_and_its_default_is_within_it(config_class: type[Any]) -> None:
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        is_number = {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}
        within = field.metadata.get("within")
        assert isinstance(within, Range) == bool(is_number), field.name
        if isinstance(within, Range) and isinstance(field.default, (int, float)):
            assert field.default in within, field.name


_NUMBERS = [
    (config_class, field.name)
    for config_class in (ServeConfig, BuildConfig)
    for field in dataclasses.fields(config_class)
    if field.metadata.get("within")
]


@pytest.mark.parametrize(("config_class", "name"), _NUMBERS)
@pytest.mark.parametrize("digits", ["1" * 400, "-" + "1" * 400, "1" * 5000, "1e400", "nan"])
def test_a_number_beyond_any_sense_is_a_short_message_from_every_source(
    config_class: type[Any], name: str, digits: str, yaml_file: Any
) -> None:
    given = {"model": "m"} if config_class is BuildConfig else {}
    with pytest.raises(ConfigError) as of_environment:
        load(config_class, given, env={f"BEI_{name.upper()}": digits})
    with pytest.raises(ConfigError) as of_flags:
        load(config_class, {**given, name: digits}, env={})
    with pytest.raises(ConfigError) as of_file:
        load(config_class, given, yaml_file(f"{name}: {digits}\n"), env={})
    for caught in (of_environment, of_flags):
        assert name in str(caught.value)
        assert len(str(caught.value)) < 250
    assert len(str(of_file.value)) < 1000


@pytest.mark.parametrize("size", ["1" * 400, "9" * 30 + "TB", "1e9", "-1GB"])
def test_a_size_beyond_any_sense_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="cache_max_size must be") as caught:
        ServeConfig(cache_max_size=size)
    assert len(str(caught.value)) < 250


def test_a_table_that_stands_for_more_text_than_there_is_memory_is_not_shown(yaml_file: Any) -> None:
    rows = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))
    with pytest.raises(ConfigError, match="must be an integer, not a list of 40"):
        load(ServeConfig, {}, yaml_file(f"port: [&a0 [x], {rows}]"), env={})


@pytest.mark.parametrize("config_class", [ServeConfig, BuildConfig])
def test_configuration_is_frozen_and_every_field_says_what_it_is(config_class: type[Any]) -> None:
    assert config_class.__dataclass_params__.frozen
    for field in dataclasses.fields(config_class):
        assert len(field.metadata["help"]) > 5, field.name


def test_the_runtime_knows_the_builder_s_settings_by_name() -> None:
    assert {field.name for field in dataclasses.fields(BuildConfig)} == BUILD_SETTINGS
