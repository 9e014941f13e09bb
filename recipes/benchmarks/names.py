"""The names that candidates have on the command line. No torch, so that `--help` is quick."""

OURS = ("1f1b", "interleaved", "interleaved-zb", "zbv", "hanayo", "hanayo-zb")
TORCHS = {
    "torch-1f1b": "Schedule1F1B",
    "torch-interleaved": "ScheduleInterleaved1F1B",
    "torch-interleaved-zb": "ScheduleInterleavedZeroBubble",
    "torch-zbv": "ScheduleZBVZeroBubble",
    "torch-hanayo-zb": "",
}
"""torch's own schedules; and our table in its runtime, whose class is `_PipelineScheduleRuntime`"""
BARE = ("bare-hanayo-zb",)
"""sleeps and messages alone, in our order: the least that any runtime could take"""
NAMES = (*OURS, *TORCHS, *BARE)
