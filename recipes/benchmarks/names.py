"""Lists the names of candidates on the command line. Imports no torch, so that `--help` is quick."""

PLANNED = "hanayo-zb-planned"
"""with the number of waves that is fastest in simulation, with measured times of a message and of the runtime"""
OURS = ("1f1b", "interleaved", "interleaved-zb", "zbv", "hanayo", "hanayo-zb", PLANNED)
TORCHS = {
    "torch-1f1b": "Schedule1F1B",
    "torch-interleaved": "ScheduleInterleaved1F1B",
    "torch-interleaved-zb": "ScheduleInterleavedZeroBubble",
    "torch-zbv": "ScheduleZBVZeroBubble",
    "torch-hanayo-zb": "",
}
"""torch's own schedules, and our table in torch's runtime, whose class is `_PipelineScheduleRuntime`"""
BARE = ("bare-hanayo-zb",)
"""only the sleeps and messages of our schedule: the least time that any runtime could need"""
AUTOGRAD = ("autograd-hanayo-zb",)
"""these, and autograd's forwards and backwards: what a runtime needs at least that computes gradients with it"""
NAMES = (*OURS, *TORCHS, *AUTOGRAD, *BARE)
