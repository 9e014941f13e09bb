"""The whole checkpoint in one file: state dicts gathered from all ranks."""
