"""Page 23 for a cluster: full means full, what is restarted, the script in a stand-in for SLURM."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, cells

from annotated.options import train_options

PAGE = ROOT / "notebooks" / "23_wmt.ipynb"


# the names of the cells that define commands and script; nothing else of the page is run
SPACE = {"__name__": "page"}
exec("import os, re, subprocess, sys\nfrom pathlib import Path", SPACE)
for source in (cell.source for cell in cells(PAGE) if cell.cell_type == "code"):
    if re.search(r"^def (full_options|training_command|slurm_script)\b", source, re.M):
        exec(re.split(r"^(?:REHEARSAL|print)\b", source, maxsplit=1, flags=re.M)[0], SPACE)
FULL = SPACE["full_options"]("big", "en-de", 32)
TINY = {"preset": "toy", "N": 1, "d_model": 16, "d_ff": 32, "h": 2, "steps": 30, "warmup": 10,
        "validate_every": 10, "save_every": 3, "average": 2, "keep_last": 3}


def test_the_script_asks_the_cluster_for_what_a_run_needs():
    script = SPACE["slurm_script"](FULL, 4, 8)
    head = re.match(r"#!/bin/bash\n((?:#SBATCH .*\n)+)", script)[1]  # sbatch stops at a command
    assert script.count("#SBATCH") == head.count("#SBATCH")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, re.MULTILINE))
    asked = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "mem": "0",
             "exclusive": "", "requeue": "", "open-mode": "append"}
    others = {"job-name", "partition", "cpus-per-task", "time", "signal", "output"}
    assert asked.items() <= options.items() and options.keys() == asked.keys() | others
    assert int(options["cpus-per-task"]) >= 8
    assert re.fullmatch(r"\d+:\d\d:\d\d", options["time"])
    name, seconds = options["signal"].split("@")
    assert getattr(signal, f"SIG{name}") is signal.SIGTERM, "which the commands note"
    patience = int(re.search(r"--shutdown-timeout=(\d+)", script)[1])
    assert 60 <= patience < int(seconds), "torchrun waits for the checkpoint, SLURM for torchrun"


def test_torchrun_and_train_know_every_option_of_the_commands_and_of_the_script():
    from torch.distributed.run import get_args_parser

    script = SPACE["slurm_script"](FULL, 4, 8).replace("\\\n", " ")
    line = next(line for line in script.splitlines() if line.startswith("srun"))
    words = re.sub(r'["$]', "", line.partition(" torchrun ")[2].partition(" > ")[0])
    words = words.replace("SLURM_NNODES", "4").split()
    python = SPACE["training_command"]("prepared", "model", "checkpoints", FULL, 8)
    for given in (words, python[3:]):
        read = get_args_parser().parse_args(given)
        assert (read.nproc_per_node, read.max_restarts, read.shutdown_timeout) == ("8", 0, 240)
        assert read.module and read.training_script == "annotated"
        assert read.training_script_args[0] == "train"
        options = train_options(read.training_script_args[1:])
        assert options.resume and options.average == 20
        assert options.preset == "big" and options.device == "cuda"
    assert get_args_parser().parse_args(words).nnodes == "4"


# A cluster of our own: programs with the names of SLURM's, on this machine

PROGRAMS = {
    "sbatch": r'''#!/bin/bash
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST="node[1-2]" SLURM_NNODES=2 SLURM_CPUS_PER_TASK=1
exec bash "$1"''',
    "scontrol": r'''#!/bin/bash
if [ "$1" = requeue ]; then echo "$@" >> requeued; else printf "localhost\nlocalhost\n"; fi''',
    "srun": f"#!{sys.executable}" + r'''
import argparse, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--cpus-per-task", type=int, required=True)
parser.add_argument("--kill-on-bad-exit", type=int, choices=(0, 1), required=True)
parser.add_argument("command", nargs=argparse.REMAINDER)
options = parser.parse_args()
tasks = [subprocess.Popen(options.command, env=os.environ | {"SLURM_NODEID": str(node)})
         for node in range(int(os.environ["SLURM_NNODES"]))]
while any(task.poll() is None for task in tasks):  # the time is over after the first checkpoints
    saved = os.listdir("checkpoints") if os.path.exists("checkpoints") else ()
    if os.path.exists("time_is_over") and len(saved) > 1:
        os.remove("time_is_over")
        for task in tasks:
            task.send_signal(signal.SIGTERM)
    time.sleep(0.02)
sys.exit(max(abs(task.returncode) for task in tasks))''',
    # one life of a run, a line of LIVES: the checkpoint that it leaves, exit status of its worker
    "torchrun": r'''#!/bin/bash
read -r saved status <<< "$(sed -n "$((${SLURM_RESTART_COUNT:-0} + 1))p" <<< "$LIVES")"
[ "$saved" = 0 ] || mkdir -p "checkpoints/step-0000000$saved"
if [ "$status" = 0 ]; then mkdir -p model; exit 0; fi
# of a SIGTERM torchrun itself prints no exit status
[ "$status" = 143 ] || echo "  exitcode  : $status (pid: 7)" >&2
exit 1'''}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder to submit from, where SLURM's programs and torchrun are ours."""
    (tmp_path / "programs").mkdir()
    for name, source in PROGRAMS.items():
        (tmp_path / "programs" / name).write_text(source)
        (tmp_path / "programs" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(folder, options, life=0, gpus=1):
    """Submit the script for two machines: (its exit status, whether it queued itself again)."""
    (folder / "job.sh").write_text(SPACE["slurm_script"](options, 2, gpus))
    (folder / "requeued").unlink(missing_ok=True)
    environment = os.environ | {"SLURM_RESTART_COUNT": str(life)} if life else os.environ
    status = subprocess.run(["sbatch", "job.sh"], env=environment, timeout=1800).returncode
    again = folder / "requeued"
    assert not again.exists() or again.read_text() == "requeue 7\n"
    return status, again.exists()


@pytest.mark.parametrize("lives, expected", [
    (["9 0"], [(0, False)]),  # done
    (["3 143", "9 0"], [(0, True), (0, False)]),  # the time was over after a checkpoint
    (["3 -9", "3 1"], [(0, True), (1, False)]),  # a process died, then without progress
    (["0 1"], [(1, False)]),  # no progress at all
    (["3 2"], [(2, False)]),  # a mistake, even after progress
])
def test_the_script_queues_itself_again_after_progress_only(cluster, monkeypatch, lives, expected):
    monkeypatch.setenv("LIVES", "\n".join(lives))
    assert [submit(cluster, {}, life) for life in range(len(lives))] == expected


@pytest.mark.long
def test_the_script_trains_on_two_machines_that_are_one_through_sigterm_and_a_mistake(cluster):
    """The real torchrun and command: two launchers with a process each that meet at one address."""
    from annotated.data.prepared import prepare_corpus

    (cluster / "programs" / "torchrun").write_text(
        "#!/bin/bash\n"
        f'exec {sys.executable} -m torch.distributed.run --local-addr=localhost "$@"\n')

    def train(life, **changes):
        outcome = submit(cluster, TINY | {"steps": 400} | changes, life)
        return outcome, (cluster / f"train-7-{life}.log").read_text()

    prepare_corpus("toy", cluster / "prepared", 600)
    (cluster / "time_is_over").touch()
    outcome, log = train(0)
    assert outcome == (0, True), log[-3000:]
    stopped = max(path.name for path in (cluster / "checkpoints").glob("step-*"))
    assert "step-00000400" > stopped and not (cluster / "model").exists()
    assert "SIGTERM" in log and not re.search(r"exitcode *: 2 ", log)
    outcome, log = train(1, steps=int(stopped[5:]) + 4)
    assert outcome == (0, False), log[-3000:]
    (cluster / "model").rename(cluster / "first")
    outcome, log = train(2, d_model=32)
    assert outcome == (2, False), "another model: nothing that a restart could mend"
    assert "annotated train: error:" in log
    assert log.count("d_model was 16 and is now 32") <= 2, "it was started again"


# The page's own restarts, and full runs without a GPU

@pytest.mark.parametrize("ends, starts, status", [
    ([0], 1, 0), ([-9, 0], 2, 0), ([2], 1, 1), ([75], 1, 1), ([143], 1, 1),
    ([1, 1, 1, 1, 1], 4, 1), ([-9, 2], 2, 1)])
def test_a_dead_process_is_started_again_and_no_other(tmp_path, ends, starts, status):
    (tmp_path / "torchrun.py").write_text(f"""
import sys
lives = open({str(tmp_path / 'lives')!r}, "a")
end = {ends}[lives.tell()]
lives.write("x")
if end not in (0, 143):
    print(f"  exitcode  : {{end}} (pid: 7)", file=sys.stderr)
sys.exit(bool(end))""")
    command = [sys.executable, str(tmp_path / "torchrun.py")]
    assert SPACE["run_training"](command, tmp_path / "log") == status
    assert len((tmp_path / "lives").read_text()) == starts


def test_a_full_run_without_a_gpu_fails_and_says_what_was_seen():
    """The whole of `make wmt` but the environment, with GPUs hidden where there are some."""
    environment = os.environ | {"WMT_RUN": "full", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.time()
    done = subprocess.run([sys.executable, "tools/wmt.py"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=1800)
    assert done.returncode == 1 and "REHEARSAL" not in done.stdout
    for part in ("the full run needs a GPU", "device 'cuda' cannot be used", "PyTorch 2.",
                 "built for CUDA", "nvidia-smi: ", "CUDA_VISIBLE_DEVICES: "):
        assert part in done.stderr.strip().splitlines()[-1], part
    copy = ROOT / "_build" / "wmt" / "23_wmt.ipynb"
    assert copy.stat().st_mtime >= begin - 1
    assert not any(cell.get("outputs") for cell in cells(copy)[10:]), "it went on"


@pytest.mark.parametrize("name, value", [("RUN", "Full"), ("SIZE", "huge"), ("PAIR", "en-cs")])
def test_another_word_than_full_is_refused_and_does_not_rehearse(name, value, monkeypatch):
    cell = next(cell.source for cell in cells(PAGE)
                if "WMT_RUN=" in cell.source and "raise ValueError" in cell.source)
    monkeypatch.setenv(f"WMT_{name}", value)
    with pytest.raises(ValueError, match="give full or rehearsal, base or big, and en-de"):
        exec(cell.partition("FULL = ")[0], {"os": os})


def test_make_wmt_runs_the_page_without_limits_of_time(monkeypatch):
    import wmt

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^wmt: setup.*\n\tWMT_RUN=full \$\(PYTHON\) tools/wmt.py$", makefile, re.M)
    given = []
    monkeypatch.setattr(wmt, "execute", lambda notebook, **options: given.append(options))
    monkeypatch.setattr(wmt.nbformat, "write", lambda *_: None)
    with pytest.raises(SystemExit, match="^0$"):
        wmt.main()
    assert given == [{"timeout": None, "after_cell": wmt.show}], "a training takes days"


def test_the_rehearsal_prints_no_score_beside_the_published_ones():
    outputs = {cell.source: "".join(output.get("text", "") for output in cell.get("outputs", ()))
               for cell in cells(PAGE)}
    table = next(text for source, text in outputs.items() if "Table 2, {PAIR.upper()}" in source)
    assert "Transformer (base)         27.30" in table and "this page" not in table
    report = next(text for source, text in outputs.items() if source.startswith("for title, rep"))
    assert "scored by" in report and not re.search(r"\d\.\d", report)
