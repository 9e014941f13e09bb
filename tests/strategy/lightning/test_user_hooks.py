"""It is found out in the user's code, wherever it was loaded from, which hooks need preparation."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_hanayo.strategy.lightning.user_hooks import may_read_gradients

CODE = """
from lightning import LightningModule

def norm(parameter):
    return parameter.{attribute}.norm()

class Module(LightningModule):
    def training_step(self, batch, batch_idx):
        return norm(self.weight)
"""


@pytest.mark.parametrize(("attribute", "reads"), [("grad", True), ("data", False)])
def test_a_file_that_importlib_has_loaded_is_read_though_it_is_not_in_sys_modules(attribute: str, reads: bool) -> None:
    file = ModuleType("plugin")
    exec(CODE.format(attribute=attribute), vars(file))
    trainer: Any = SimpleNamespace(lightning_module=file.Module())
    assert may_read_gradients(trainer) is reads
