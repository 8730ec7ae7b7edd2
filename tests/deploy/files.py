"""The files below deploy/, for the tests of both tiers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "bei"
SCHEMA = CHART / "values.schema.json"
TEMPLATES = sorted((CHART / "templates").iterdir())
COMPOSE = DEPLOY / "compose.yaml"
