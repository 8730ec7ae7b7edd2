"""Tasks on top of a ``ModelService``: embedding, reranking, classification, token classification. No HTTP.

Every task checks first that the model has it (TaskNotSupportedError). It raises what
``ModelService.infer`` raises.
"""
