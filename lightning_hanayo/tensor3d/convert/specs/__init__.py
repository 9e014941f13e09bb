"""The kinds: what the swap knows of blocks and layers, one file per family, and the tables that users extend."""
