"""Recipes: models, data and YAML configurations to run and to copy from."""
