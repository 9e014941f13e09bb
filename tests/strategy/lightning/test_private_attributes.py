"""Lightning's private side is touched in one package, and every private name that it uses is listed here.

When a new release of Lightning renames one of them, this list says what to look at.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning
import torchmetrics

import lightning_hanayo

PACKAGE = Path(lightning_hanayo.__file__).parent
ALLOWED = PACKAGE / "strategy" / "lightning"

USED = {
    "imported": {
        "_LRCallback",
        "_LoggerConnector",
        "_Loop",
        "_SubprocessScriptLauncher",
        "_init_dist_connection",
        "_optimizer_to_device",
        "_plugin_to_compute_dtype",
        "_set_num_threads_if_needed",
        "_sync_ddp_if_available",
    },
    "of the Trainer and its loops": {
        "_active_loop",
        "_batches_that_stepped",
        "_broadcast_sigterm_tensor",
        "_callback_metrics",
        "_checkpoint_connector",
        "_combined_loader",
        "_combined_loader_states_to_load",
        "_data_fetcher",
        "_data_source",
        "_evaluation_step",
        "_first_loop_iter",
        "_loaded_checkpoint",
        "_logged_metrics",
        "_logger_connector",
        "_mode",
        "_original_handlers",
        "_predict_step",
        "_restart_stage",
        "_restarting",
        "_results",
        "_signal_connector",
        "_should_accumulate",
        "_should_check_val_fx",
        "_sigterm_notifier_fn",
        "_slurm_sigusr_handler_fn",
        "_store_dataloader_outputs",
        "_teardown",
    },
    "of modules and callbacks": {
        "_apply_batch_transfer_handler",
        "_average_model",
        "_batch_arg_name",
        "_compiler_ctx",
        "_device",
        "_every_n_train_steps",
        "_forward_example_input",
        "_handles",
        "_model",
        "_on_before_batch_transfer",
        "_profiler_kwargs",
        "_records",
        "_register",
        "_throughputs",
        "_trainer",
        "_train_time_interval",
    },
    "of strategies and launchers": {
        "_DtypeContextManager",
        "_HYDRA_AVAILABLE",
        "_auto_add_worker_init_fn",
        "_basic_subprocess_cmd",
        "_call_children_scripts",
        "_clip_gradients",
        "_check_can_spawn_children",
        "_configure_launcher",
        "_hydra_subprocess_cmd",
        "_launcher",
        "_layer_sync",
        "_lightning_module",
    },
    "of loggers": {"_log_graph", "_log_model"},
    "of torchmetrics": {"_computed", "_copy_state_dict", "_forward_cache", "_reductions", "_update_count"},
}


@cache
def private_names() -> frozenset[str]:
    """All private names that Lightning and torchmetrics define, as attributes, functions or classes."""
    folders = [Path(lightning.__file__).parent / part for part in ("pytorch", "fabric")]
    metric = Path(torchmetrics.__file__).parent / "metric.py"
    files = [metric, *(path for folder in folders for path in folder.rglob("*.py"))]
    pattern = re.compile(r"\b(?:def|class) (_[a-zA-Z]\w*)|\bself\.(_[a-zA-Z]\w*)\b\s*(?::[^=\n]+)?=")
    found = {name for path in files for match in pattern.findall(path.read_text()) for name in match}
    return frozenset(name for name in found if name and not name.startswith("__"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def uses(path: Path) -> Iterator[tuple[str, int]]:
    """The private names of Lightning that a file uses, with their lines; not those that it defines for itself."""
    own = {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lightning.", "torchmetrics")):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr in private_names() and node.attr not in own:
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in private_names():
            yield node.value, node.lineno


def defines(path: Path) -> Iterator[str]:
    """The private methods and attributes of Lightning that a file of the one package overrides or assigns."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "override" for one in node.decorator_list):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_private_names_are_used_in_one_package() -> None:
    listed = set().union(*USED.values())
    elsewhere = [
        f"{path.relative_to(PACKAGE)}:{line} uses {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if ALLOWED not in path.parents
        for name, line in uses(path)
        if name in listed or not name_is_own(name)
    ]
    assert not elsewhere, f"move these into {ALLOWED.relative_to(PACKAGE.parent)}: {elsewhere}"


@cache
def own_names() -> frozenset[str]:
    """Private names that the package defines somewhere, or torch does."""
    import torch

    all_of_them = [node for path in PACKAGE.rglob("*.py") for node in nodes(path)]
    functions = {node.name for node in all_of_them if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {node.attr for node in all_of_them if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    assigned = [node.target for node in all_of_them if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in assigned if isinstance(target, ast.Name)}
    return frozenset(functions | stored | fields | set(dir(torch.Tensor)) | set(dir(torch.nn.Module())))


def name_is_own(name: str) -> bool:
    return name in own_names()


def test_every_private_name_is_listed() -> None:
    listed = set().union(*USED.values())
    used = {name for path in ALLOWED.rglob("*.py") for name, _ in uses(path)}
    used |= {name for path in ALLOWED.rglob("*.py") for name in defines(path) if name in listed}
    assert used == listed
