"""Retrieval of images and captions by order embeddings: the authors' model, its archives, and the experiment."""
