"""Weights in Hugging Face's files and names: folders of safetensors, which models take values from."""
