"""The checkpoint: single-process names and values, whatever the layout."""
