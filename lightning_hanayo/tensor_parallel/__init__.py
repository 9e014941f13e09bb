"""3-D tensor parallelism (arXiv 2105.14450): layers whose weights and activations are sharded over a mesh of ranks.

`HanayoStrategy(cube=...)` converts a model's blocks by itself. These names are for registering blocks of your own,
and for building models of 3-D layers directly. They are imported on first use, so registering a block doesn't
import the layers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.convert.block_specs import BlockSpec, ProjectionGroup, register_block
    from lightning_hanayo.tensor_parallel.convert.layer_specs import elementwise, register_layer
    from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
    from lightning_hanayo.tensor_parallel.layers.attention import MultiheadAttention3D
    from lightning_hanayo.tensor_parallel.layers.embedding import Embedding3D, Head3D, cross_entropy3d
    from lightning_hanayo.tensor_parallel.layers.linear import FeedForward3D, Linear3D, SwiGLU3D
    from lightning_hanayo.tensor_parallel.layers.norm import Dropout3D, LayerNorm3D, RMSNorm3D, parallelize_rms_norm
    from lightning_hanayo.tensor_parallel.mesh import Mesh
    from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, SEQUENCE_FIRST, ParallelStyle
    from lightning_hanayo.tensor_parallel.sharding import all_reduce_partial_gradients
    from lightning_hanayo.tensor_parallel.stage_context import StageContext

_MODULES = (
    "convert.block_specs",  # first: the only one that imports no torch
    "convert.parallelize", "convert.layer_specs", "layers.attention", "layers.embedding",
    "layers.linear", "layers.norm", "mesh", "product", "sharding", "stage_context",
)  # fmt: skip

__all__ = [
    "BATCH", "SEQUENCE", "SEQUENCE_FIRST", "BlockSpec", "Dropout3D", "Embedding3D", "FeedForward3D", "Head3D",
    "LayerNorm3D", "Linear3D", "Mesh", "MultiheadAttention3D", "ParallelStyle", "ProjectionGroup", "RMSNorm3D",
    "StageContext", "SwiGLU3D", "all_reduce_partial_gradients", "cross_entropy3d", "elementwise",
    "parallelize_rms_norm", "plan_parallelize", "register_block", "register_layer",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the module that defines `name` on first use."""
    for module in _MODULES if name in __all__ else ():
        if hasattr(found := import_module(f"{__name__}.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
