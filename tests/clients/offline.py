"""Settings that keep clients from asking anyone but the server under test. Import before the first client."""

from __future__ import annotations

import os

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "NO_PROXY": "127.0.0.1",
    }
)
