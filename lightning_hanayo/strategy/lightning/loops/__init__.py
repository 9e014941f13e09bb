"""Where Lightning's loops continue after a resume, and the states of the loaders that they read."""
