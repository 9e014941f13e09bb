"""The memory of what a weight-gradient queue keeps."""

from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue


def queued_bytes(queue: WeightGradientQueue) -> int:
    """Bytes of memory that the kept operands use; each storage counts once."""
    computations = [one for waiting in queue._waiting.values() for kept in waiting.values() for one in kept]
    storages = [operand.untyped_storage() for _, operands in computations for operand in operands]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
