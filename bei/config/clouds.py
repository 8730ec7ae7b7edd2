"""Variables by which clouds tell a container where it is asked: Vertex AI's and SageMaker's.

References: cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements ("Environment variables");
docs.aws.amazon.com/sagemaker/latest/dg/inference-pipeline-real-time.html. SageMaker's paths are fixed: ``/ping`` and
``/invocations``.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS: Mapping[str, str] = {
    "SAGEMAKER_BIND_TO_PORT": "port",
    "AIP_HTTP_PORT": "port",
    "AIP_HEALTH_ROUTE": "health_path",
    "AIP_PREDICT_ROUTE": "predict_path",
}


def cloud_settings(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of ``bei serve`` that a cloud has set, by name."""
    return {setting: env[variable] for variable, setting in SETTINGS.items() if env.get(variable)}
