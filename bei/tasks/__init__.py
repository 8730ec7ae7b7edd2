"""Tasks on top of ``InferenceService``: embedding, reranking, classification, token classification. No HTTP.

Every task checks first that the model has it (TaskNotSupportedError). It raises what
``InferenceService.infer`` raises.
"""
