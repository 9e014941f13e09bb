"""The commit protocol of a folder: its steps, what each rank writes, and how it becomes the checkpoint."""
