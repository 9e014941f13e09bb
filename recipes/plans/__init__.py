"""The worked examples of `docs/guides/plan.md`: `python -m recipes.plans` makes their tables."""
