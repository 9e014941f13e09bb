"""What forward and backward of one micro-batch mean on each kind of stage."""
