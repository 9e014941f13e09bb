"""A vision transformer of transformers, on shapes that are drawn as they are needed."""
