"""`check` trains a user's module in one process and on a layout, and compares losses, gradients, weights and logs.

check_module           what users call
inputs, prepare        what is trained: batches, options, a copy of the module
trainings              in one process and on the layout; what each process does for them
comparison, causes     what differs, and why
examine, verdict       which runs are compared, and what is said about them; report: how it is shown
"""

from lightning_hanayo.checking.check_module import check
from lightning_hanayo.checking.verdict import Verdict

__all__ = ["Verdict", "check"]
