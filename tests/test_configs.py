"""Every recipe in configs/ is a valid build configuration and builds a repository of its shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact, Manifest
from bei.config.sources import load
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.reference import held_out
from bei_build.targets.choose import compiler_for
from tests.support.builds import open_engine, silent
from tests.support.checkpoints import MAX_TOKENS
from tests.support.recipes import FAMILY_TABLE, REPOSITORIES, Repository

RECIPES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
NUM_TEXTS = 12  # of the held-out ones: enough for a tiny model, and verification is most of a build


def _config(recipe: Path) -> BuildConfig:
    return load(BuildConfig, {}, str(recipe), env={})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_called_after_its_model_and_names_a_target(recipe: Path) -> None:
    config = _config(recipe)
    assert config.name == config.model.split("/")[1]
    assert config.name.lower() == recipe.stem
    assert compiler_for(config).resolve_precision("auto")


def test_every_repository_of_the_family_table_has_a_recipe() -> None:
    models = {_config(recipe).model for recipe in RECIPES}
    assert {model for repositories in FAMILY_TABLE.values() for model in repositories} - models == set()


def test_every_recipe_has_its_repository_made_small() -> None:
    assert {recipe.stem for recipe in RECIPES} == set(REPOSITORIES)


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = held_out.held_out_texts()[:NUM_TEXTS]
    monkeypatch.setattr(held_out, "held_out_texts", lambda: texts)


@pytest.mark.usefixtures("few_texts")
@pytest.mark.parametrize(
    "recipe",
    [  # the classes that they name are built in the first tier by their families' tests
        pytest.param(recipe, id=recipe.stem, marks=pytest.mark.slow if number % 3 else ())
        for number, recipe in enumerate(RECIPES)
    ],
)
def test_a_recipe_builds_its_repository_made_small(recipe: Path, tmp_path: Path) -> None:
    config, repository = _config(recipe), REPOSITORIES[recipe.stem]
    artifact = _built(config, repository, tmp_path)
    manifest = artifact.manifest
    assert manifest.name == config.name
    assert manifest.tasks == (["rerank"] if config.rerank_body else list(repository.tasks))  # others have no template
    assert {output.name: output.dimension for output in manifest.outputs} == repository.outputs
    assert (manifest.embedding.pooling if manifest.embedding else None) == repository.pooling
    assert manifest.prompts == {**repository.prompts, **config.prompts}
    _assert_classification(manifest, repository)
    _assert_template(manifest, config)
    _assert_roles(manifest, repository)
    _assert_tokenizer(artifact, repository)


def _built(config: BuildConfig, repository: Repository, folder: Path) -> Artifact:
    """The recipe's settings on a small checkpoint; what depends on its place, size and weights is replaced."""
    config = replace(
        config,
        model=str(repository.save(folder / "checkpoint")),
        out=str(folder / "artifact"),
        max_seq_len=min(config.max_seq_len or MAX_TOKENS, MAX_TOKENS),
        precision="fp32",  # how far bf16 is from it with random weights says nothing of the model
        reference="engine",
    )
    return build(config, open_engine, silent())


def _assert_classification(manifest: Manifest, repository: Repository) -> None:
    if not repository.labels:
        assert manifest.classification is None
        return
    assert manifest.classification is not None
    assert manifest.classification.labels == list(repository.labels)
    assert manifest.classification.function == repository.function


def _assert_template(manifest: Manifest, config: BuildConfig) -> None:
    if config.classify_body:
        asked = manifest.classify_template
        assert asked
        parts = (config.classify_prefix, config.classify_body, config.classify_suffix)
        assert (asked.prefix, asked.body, asked.suffix) == parts
    if not config.rerank_body:
        assert manifest.rerank_template is None
        return
    template = manifest.rerank_template
    assert template is not None
    assert (template.prefix, template.body) == (config.rerank_prefix, config.rerank_body)
    assert (template.suffix, template.instruction) == (config.rerank_suffix, config.rerank_instruction)
    assert "{query}" in template.body
    assert "{document}" in template.body
    assert ("{instruction}" in template.body) == bool(template.instruction)


def _assert_roles(manifest: Manifest, repository: Repository) -> None:
    """Late interaction of all repositories fills queries up and leaves punctuation out of documents."""
    assert {side: role.max_tokens for side, role in manifest.roles.items()} == repository.lengths
    if repository.lengths:
        query, document = manifest.roles["query"], manifest.roles["document"]
        assert query.expansion is not None
        assert (query.expansion.num_tokens, query.expansion.attended) == (repository.lengths["query"], False)
        assert (document.expansion, query.skip_ids) == (None, [])
        assert document.skip_ids


def _assert_tokenizer(artifact: Artifact, repository: Repository) -> None:
    """Prompts that are tokens stay tokens, and the last token, which such models pool, is the one asked for."""
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    if repository.last_token:
        assert tokenizer.encode("hello").tokens[-1] == repository.last_token
    if artifact.manifest.tasks == ["embed_tokens"]:
        for prompt in artifact.manifest.prompts.values():
            assert tokenizer.encode(f"{prompt}hello").tokens[1].strip() == prompt.strip()
