"""What a cube's ranks hold makes up a checkpoint, of which another cube's ranks read what they hold."""

from itertools import product
from pathlib import Path

import pytest
import torch

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region, partition_problem
from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard, fused_order
from tests.checkpoint.folders import write_folder

CUBES: list[MeshSizes] = [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)]


def mesh_of(sizes: MeshSizes) -> Mesh:
    return Mesh(sizes, 0, lambda names: None)


def shards_on(mesh: Mesh) -> dict[str, Shard]:
    """Parameters as the layers of a model shard them: some sizes don't divide, and some ranks hold replicas."""
    order = fused_order((8, 8, 8), mesh.size("y"))
    return {
        "model/up": Shard((DimShard(16, SEQUENCE.out_axes), DimShard(8, SEQUENCE.in_axes))),
        "model/down": Shard((DimShard(8, "zx"), DimShard(16, "y"))),
        "model/qkv": Shard((DimShard(24, BATCH.out_axes, order), DimShard(8, BATCH.in_axes))),
        "model/bias": Shard((DimShard(24, "y", order),), "xz"),
        "model/norm": Shard((DimShard(8, "z"),), "xy"),
        "model/uneven": Shard((DimShard(13, "yx"), DimShard(3, "z"))),
        "model/few": Shard((DimShard(3, "xyz", as_one=True), DimShard(2))),
        "model/scale": Shard(()),
    }


def regions_on(mesh: Mesh, shard: Shard) -> dict[tuple[int, int, int], Region]:
    return {
        place: Region.of_entries([dim.entries_at(mesh, place) for dim in shard.dims])
        for place in product(*map(range, mesh.sizes))
    }


@pytest.mark.parametrize("sizes", CUBES)
def test_the_parts_of_a_cube_make_up_each_parameter(sizes: MeshSizes) -> None:
    mesh = mesh_of(sizes)
    for name, shard in shards_on(mesh).items():
        regions = regions_on(mesh, shard)
        held = [region for region in regions.values() if region.num_entries]
        assert partition_problem(shard.shape, list(dict.fromkeys(held))) is None, name
        assert {place: region.shape for place, region in regions.items()} == {
            place: shard.local_shape(mesh, place) for place in regions
        }


@pytest.mark.parametrize(("written", "read"), [(CUBES[3], CUBES[4]), (CUBES[4], CUBES[2]), (CUBES[5], CUBES[0])])
def test_another_cube_reads_what_it_holds(tmp_path: Path, written: MeshSizes, read: MeshSizes) -> None:
    writers, readers = mesh_of(written), mesh_of(read)
    whole = {
        name: torch.arange(float(torch.Size(shard.shape).numel())).view(shard.shape)
        for name, shard in shards_on(writers).items()
    }
    cut = {
        name: list(dict.fromkeys(one for one in regions_on(writers, shard).values() if one.num_entries))
        for name, shard in shards_on(writers).items()
    }
    write_folder(tmp_path, whole, cut)
    folder = CheckpointFolder(tmp_path)
    folder.verify()
    for name, shard in shards_on(readers).items():
        for place, region in regions_on(readers, shard).items():
            assert torch.equal(folder.read(name, region), shard.of(whole[name], readers, place)), (name, place)
