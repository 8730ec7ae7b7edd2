"""The certificate of an engine's agreement with its reference: record, page, charts, thresholds, canary."""
