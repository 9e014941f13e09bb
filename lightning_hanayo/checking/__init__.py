"""`check` trains a user's module in one process and on a layout, and compares losses, gradients, weights and logs.

check_module      what users call
case              the module, its batches and options; what a rank of a run returns
trainings         in one process and on the layout; what each process does for them
comparison        the values of two runs, by name
examine, verdict  which runs are compared, and what is said about them
"""

from lightning_hanayo.checking.check_module import check
from lightning_hanayo.checking.examine import Verdict

__all__ = ["Verdict", "check"]
