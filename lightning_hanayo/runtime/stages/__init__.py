"""The kinds of stages, each of which knows what forward and backward of one micro-batch mean there."""
