"""How losses and logs of micro-batches add up: dry runs of the step show it, and decide how often the step runs."""
