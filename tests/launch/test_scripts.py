"""The launch scripts with stand-ins for the cluster's commands and for the training."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Stands for `python`: of `-m mars2_jax.train` it notes the arguments, and what else of the environment matters, and
# ends with the next code of the file "codes", 0 where there is none. "wait" waits for SIGTERM, "hang" for SIGKILL.
PYTHON = """#!/usr/bin/env bash
if [[ "$1" != -m ]]; then exec python3 "$@"; fi
exec 8>>"$HERE/lock"
flock 8
echo "$* gpus=${CUDA_VISIBLE_DEVICES:-} ids=${JAX_LOCAL_DEVICE_IDS:-} ${XLA_FLAGS:-}" >>"$HERE/trained"
code="$(head -n 1 "$HERE/codes" 2>/dev/null)"
sed -i 1d "$HERE/codes" 2>/dev/null
flock -u 8
[[ "$*" =~ --stopped_code=([0-9]+) ]] && stopped="${BASH_REMATCH[1]}"
case "$code" in
  wait) trap 'exit ${stopped:-0}' TERM; while true; do sleep 0.05; done ;;
  stopped) exit "${stopped:-0}" ;;
  hang) trap '' TERM; while true; do sleep 0.05; done ;;
esac
exit "${code:-0}"
"""

# Notes its arguments, and runs what follows the options of srun.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$HERE/said"
while [[ "$1" == --* ]]; do shift; done
"$@" &
echo $! >"$HERE/task"
wait $!
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>"$HERE/said"
kill -TERM "$(cat "$HERE/task")"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$HERE/said"
"""

# A slice whose states are the lines of "states", READY where there is none; its workers are this machine.
GCLOUD = """#!/usr/bin/env bash
echo "gcloud $*" >>"$HERE/said"
case "$4" in
  describe)
    state="$(head -n 1 "$HERE/states" 2>/dev/null)"
    sed -i 1d "$HERE/states" 2>/dev/null
    [[ "$state" != ABSENT ]] || exit 1
    echo "${state:-READY}" ;;
  scp) tar -tzf "$5" >"$HERE/archive" ;;
  ssh)
    for option; do
      if [[ "$option" == --command=*mars2_jax.train* ]]; then
        command="${option#--command=}"
        export HOME="$HERE"
        mkdir -p "$HERE/mars2_jax/.venv/bin"
        cp "$HERE/python" "$HERE/mars2_jax/.venv/bin/python"
        cd "$HERE" && bash -c "$command"
        exit $?
      fi
    done ;;
esac
"""


@pytest.fixture
def here(tmp_path):
    for name, text in dict(
        python=PYTHON, srun=SRUN, scancel=SCANCEL, scontrol=SCONTROL, gcloud=GCLOUD, nvidia_smi="#!/bin/sh\n"
    ).items():
        path = tmp_path / name.replace("_", "-")
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def environment(here, **more):
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "XLA_FLAGS")}
    path = f"{here}:{os.environ['PATH']}"
    return kept | {"PATH": path, "HERE": str(here), "PYTHON": str(here / "python"), "GRACE": "1", "PAUSE": "0"} | more


def launch(here, script, *arguments, **more):
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, env=environment(here, **more), capture_output=True, text=True, timeout=60, cwd=here)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("script", ["local_multiprocess.sh", "slurm.sbatch", "tpu_vm.sh", "env.sh"])
def test_scripts_are_sound(script):
    path = str(ROOT / "launch" / script)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", "--exclude=SC2155", path], check=True)


def test_local_processes_get_coordinates_and_devices(here):
    done = launch(here, "local_multiprocess.sh", "config.py:beta", "run", "2", "--config.seed=1", CPU_DEVICES="4")
    assert done.returncode == 0, done.stderr
    first, second = sorted(lines(here / "trained"))
    where = f"--config={here}/config.py:beta --workdir={here}/run --num_processes=2"
    assert first.startswith(f"-m mars2_jax.train {where} --process_id=0 --coordinator_address=127.0.0.1:")
    assert second.split("--process_id=1")[1].split(" gpus")[0] == first.split("--process_id=0")[1].split(" gpus")[0]
    assert first.split(" gpus=")[0].endswith(" --config.seed=1")
    assert "gpus= " in first and "device_count=4" in first


def test_local_processes_share_out_the_gpus(here):
    done = launch(here, "local_multiprocess.sh", "c", "w", "2", CUDA_VISIBLE_DEVICES="0,1,5,7")
    assert done.returncode == 0, done.stderr
    first, second = sorted(lines(here / "trained"))
    assert "gpus=0,1 " in first and "gpus=5,7 " in second
    refused = launch(here, "local_multiprocess.sh", "c", "w", "3", CUDA_VISIBLE_DEVICES="0,1,5,7")
    assert refused.returncode == 2 and "4 GPUs cannot be shared out evenly among 3" in refused.stderr


def test_local_processes_start_again_together(here):
    """One dies, the other hangs and is killed; then all is well."""
    (here / "codes").write_text("hang\n75\n0\n0\n")
    done = launch(here, "local_multiprocess.sh", "c", "w", "2")
    assert done.returncode == 0, done.stderr
    assert len(lines(here / "trained")) == 4
    assert "ended with exit code 75" in done.stderr and "starting all again" in done.stderr


def test_local_processes_do_not_start_again_for_ever_nor_after_a_mistake(here):
    (here / "codes").write_text("1\n75\n" * 2)
    done = launch(here, "local_multiprocess.sh", "c", "w", "2", RESTARTS="1")
    assert done.returncode in (1, 75) and len(lines(here / "trained")) == 4 and "giving up" in done.stderr
    (here / "codes").write_text("75\n2\n")
    done = launch(here, "local_multiprocess.sh", "c", "w", "2")
    assert done.returncode == 2 and len(lines(here / "trained")) == 6
    for wrong in (("c", "w"), ("c", "w", "none"), ("c", "w", "0")):
        assert launch(here, "local_multiprocess.sh", *wrong).returncode == 2


def start(here, script, *arguments, trained, **more):
    """A script whose training waits, once so many processes of it do."""
    process = subprocess.Popen(
        # A shell cannot trap what was ignored when it began, as SIGINT is where tests run in the background.
        ["env", "--default-signal=INT", "bash", str(ROOT / "launch" / script), *arguments],
        env=environment(here, **more),
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
    )
    deadline = time.monotonic() + 30
    while len(lines(here / "trained")) < trained:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)  # until they handle signals
    return process


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_local_processes_stop_in_good_order(here, sent):
    (here / "codes").write_text("wait\nwait\n")
    process = start(here, "local_multiprocess.sh", "c", "w", "2", trained=2)
    process.send_signal(sent)
    assert process.wait(timeout=30) == 0, process.stderr.read()
    assert len(lines(here / "trained")) == 2


SLURM = dict(SLURM_JOB_ID="77", SLURM_GPUS_ON_NODE="4")


def slurm(here, **more):
    return launch(here, "slurm.sbatch", "c.py", "/w", "--config.seed=1", **SLURM, SLURM_SUBMIT_DIR=str(here), **more)


def test_slurm_starts_one_task_a_node_with_all_its_gpus(here):
    done = slurm(here)
    assert done.returncode == 0, done.stderr
    assert lines(here / "trained")[0].startswith(
        "-m mars2_jax.train --config=c.py --workdir=/w --stopped_code=85 --config.seed=1 gpus= ids=0,1,2,3"
    )
    (said,) = lines(here / "said")
    assert said.startswith("srun --kill-on-bad-exit=0 --wait=0 ")
    header = (ROOT / "launch" / "slurm.sbatch").read_text()
    for option in ("--ntasks-per-node=1", "--requeue", "--signal=B:TERM@300"):
        assert f"#SBATCH {option}\n" in header


def test_slurm_requeues_after_a_failure_but_not_after_a_mistake(here):
    (here / "codes").write_text("75\n75\n2\n")
    assert slurm(here).returncode == 0
    assert lines(here / "said")[-1] == "scontrol requeue 77"
    assert slurm(here, SLURM_RESTART_COUNT="10").returncode == 75
    assert slurm(here).returncode == 2
    assert lines(here / "said").count("scontrol requeue 77") == 1
    assert launch(here, "slurm.sbatch", "c", "w").returncode == 2  # without sbatch


def test_slurm_saves_and_requeues_near_the_time_limit(here):
    (here / "codes").write_text("wait\n")
    process = start(here, "slurm.sbatch", "c", "w", trained=1, **SLURM, SLURM_SUBMIT_DIR=str(here))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0, process.stderr.read()
    assert lines(here / "said")[1:] == ["scancel --signal=TERM 77", "scontrol requeue 77"]


def test_slurm_requeues_tasks_that_were_told_to_stop_without_the_script(here):
    """As SLURM does with a job that is preempted with a grace time: the tasks end in good order, and are not done."""
    (here / "codes").write_text("stopped\n0\n")
    done = slurm(here, SLURM_RESTART_COUNT="10")
    assert done.returncode == 0 and "stopped on request" in done.stderr
    assert lines(here / "said")[-1] == "scontrol requeue 77"
    assert slurm(here).returncode == 0
    assert lines(here / "said").count("scontrol requeue 77") == 1


TPU = dict(TPU="pod", ZONE="z")


def test_tpu_workers_get_the_checkout_and_one_command(here):
    done = launch(here, "tpu_vm.sh", "configs/x.py", "/mnt/a b", "--config.seed=1", **TPU, SETUP="mount it")
    assert done.returncode == 0, done.stderr
    describe, scp, unpack, setup, train = lines(here / "said")
    assert describe.startswith("gcloud compute tpus tpu-vm describe pod") and describe.endswith("--zone=z --quiet")
    assert "scp" in scp and "pod:mars2_jax.tar.gz --worker=all" in scp
    assert "launch/env.sh tpu" in unpack and "--command=mount it" in setup
    assert "ssh pod --worker=all" in train
    assert lines(here / "trained")[0].startswith(
        "-m mars2_jax.train --config=configs/x.py --workdir=/mnt/a b --stopped_code=85 --config.seed=1 "
    )
    archive = lines(here / "archive")
    assert "launch/env.sh" in archive and "mars2_jax/train.py" in archive
    assert launch(here, "tpu_vm.sh", "c", "w").returncode == 2  # which TPU?


def test_a_slice_that_was_preempted_is_made_again(here):
    (here / "codes").write_text("255\n0\n")
    (here / "states").write_text("READY\nPREEMPTED\nABSENT\nCREATING\nREADY\n")
    done = launch(here, "tpu_vm.sh", "c", "w", **TPU, CREATE="--accelerator-type=v5litepod-16 --spot")
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("gcloud compute tpus tpu-vm ").split(" --zone")[0] for line in lines(here / "said")]
    again = said[said.index("delete pod") :]
    assert again[0] == "delete pod" and again[2] == "create pod --accelerator-type=v5litepod-16 --spot"
    assert len(lines(here / "trained")) == 2


def test_workers_that_were_told_of_a_preemption_are_started_again(here):
    (here / "codes").write_text("stopped\n0\n")
    done = launch(here, "tpu_vm.sh", "c", "w", **TPU)
    assert done.returncode == 0, done.stderr
    assert len(lines(here / "trained")) == 2


def test_a_slice_is_not_tried_for_ever_nor_after_a_mistake(here):
    (here / "codes").write_text("75\n75\n2\n")
    assert launch(here, "tpu_vm.sh", "c", "w", **TPU, RESTARTS="1").returncode == 75
    assert launch(here, "tpu_vm.sh", "c", "w", **TPU).returncode == 2
