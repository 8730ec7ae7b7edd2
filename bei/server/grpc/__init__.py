"""The gRPC server: text-embeddings-inference's services and those of the Open Inference Protocol."""
