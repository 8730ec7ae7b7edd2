"""The ahead-of-time builder: Hugging Face checkpoint in, artifact out."""
