"""The files of a checkpoint folder: what is in them, how they are written, and when they are refused."""
