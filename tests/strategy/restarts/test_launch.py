"""Who has started a process, told from the variables of torchrun and SLURM."""

from lightning_hanayo.strategy.restarts import Launch, is_requeued, is_restarted, launch_from

SLURM = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


def torchrun(folder: str = "/tmp/torchelastic_a/none_b", attempt: int = 0, run_id: str = "none") -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": f"{folder}/attempt_{attempt}/0/error.json",
        "RANK": "0",
    }


def starters_of(environment: dict[str, str], command: str = "train.py") -> set[str]:
    launch = launch_from(environment, command)
    assert launch is not None
    return set(launch.starters)


def test_a_script_that_is_run_alone_has_nobody_who_starts_it_again() -> None:
    assert launch_from({}, "train.py") is None
    assert launch_from({"RANK": "0", "WORLD_SIZE": "2"}, "train.py") is None


def test_the_same_agent_starts_a_process_again() -> None:
    assert starters_of(torchrun()) == starters_of(torchrun(attempt=1))


def test_another_agent_with_the_same_run_id_starts_another_run() -> None:
    assert not starters_of(torchrun()) & starters_of(torchrun(folder="/tmp/torchelastic_c/none_d"))


def test_without_log_folders_the_parent_process_is_the_agent() -> None:
    environment = {**torchrun(), "TORCHELASTIC_ERROR_FILE": "/dev/null"}
    assert starters_of(environment) == starters_of(environment)
    assert starters_of(environment) != starters_of(torchrun())


def test_a_requeued_job_runs_the_same_command_in_the_same_step() -> None:
    assert starters_of(SLURM) == starters_of({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert not starters_of(SLURM) & starters_of(SLURM, "evaluate.py")
    assert not starters_of(SLURM) & starters_of({**SLURM, "SLURM_STEP_ID": "1"})
    assert is_requeued({"SLURM_RESTART_COUNT": "1"})
    assert not is_requeued({"SLURM_RESTART_COUNT": "0"}) and not is_requeued({})


def test_a_restart_is_counted_by_torchrun_or_slurm() -> None:
    assert is_restarted({"TORCHELASTIC_RESTART_COUNT": "2"}) and is_restarted({"SLURM_RESTART_COUNT": "1"})
    assert not is_restarted({"TORCHELASTIC_RESTART_COUNT": "0"}) and not is_restarted({})


def test_torchrun_in_a_job_is_started_by_both() -> None:
    launch = launch_from({**SLURM, **torchrun(run_id="a/b")}, "train.py")
    assert isinstance(launch, Launch)
    assert launch.key == "torchrun-a_b"
    assert len(launch.starters) == 2
