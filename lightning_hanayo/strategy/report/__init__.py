"""Reports on a run: its layout, how the pipeline ran, and where its results are."""
