"""Two processes with two devices each against one with four: the same run, written once."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from dflash_jax import load_drafter, sharding
from dflash_jax.config import ConfigError
from dflash_jax.sharding import make_mesh
from dflash_jax.training import from_config, processes
from dflash_jax.training.checkpointing import Checkpoints
from tests.training import one_of_two, toy, two_processes
from tests.training.two_processes import arrays, kill_behind, lines, same_bit_by_bit, wait_for


def compare(ours, theirs):
    """Metrics and states of two runs agree; each line stands once."""
    assert [(x["step"], x["kind"]) for x in lines(ours)] == [(x["step"], x["kind"]) for x in lines(theirs)]
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        if one["kind"] == "eval":
            assert one["rounds"] == other["rounds"]
        else:
            for name in ("loss", "grad_norm", "accuracy", "chain_tau", "blocks"):
                np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)


def start_two(workdir, *options):
    return two_processes.start_two("tests.training.one_of_two", workdir, *options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The workdirs of one process and of two, behind step 4."""
    root = tmp_path_factory.mktemp("straight")
    one, two = root / "one", root / "two"
    one_of_two.run(one, 4)
    wait_for(start_two(two))
    return one, two


@pytest.mark.slow  # processes that share two cores wait for each other
def test_two_processes_train_as_one(straight):
    one, two = straight
    compare(two, one)
    assert [x["kind"] for x in lines(two)].count("eval") == 2
    ours, theirs = arrays(two, 4), arrays(one, 4)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-5, err_msg=path)
    assert {p.name for p in two.iterdir()} == {p.name for p in one.iterdir()}
    best = [json.loads((workdir / "best.json").read_text()) for workdir in (one, two)]
    assert best[0] == best[1]
    drafters = [load_drafter(workdir / "export", toy.target(), dtype="float32") for workdir in (one, two)]
    for a, b in zip(*(jax.tree.leaves(d.params) for d in drafters), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5)  # stored in bfloat16


@pytest.mark.slow
def test_two_processes_killed_and_started_again(straight, tmp_path):
    """Bit by bit what two processes that nobody killed arrive at."""
    _, two = straight
    started = start_two(tmp_path, "hang")
    kill_behind(started, tmp_path, 2)
    assert not (tmp_path / "checkpoints" / "4").exists()
    wait_for(start_two(tmp_path))
    same_bit_by_bit(tmp_path, two, 4)  # the evaluation behind step 2, which was killed, is made up for


@pytest.mark.slow
def test_a_preemption_notice_to_one_process_stops_both_at_one_step(straight, tmp_path):
    _, two = straight
    started = start_two(tmp_path, str(toy.STEPS))
    deadline = time.monotonic() + 400
    while not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path):
        for process in started:
            assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started[1].send_signal(signal.SIGTERM)
    for process in started:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert "Reached preemption sync point" not in errors  # Orbax asked, from the thread that writes
    stopped = lines(tmp_path)[-1]["step"]
    assert stopped < toy.STEPS
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest == stopped
    before = [x for x in lines(two) if x["kind"] == "train"][:stopped]
    ours = [x for x in lines(tmp_path) if x["kind"] == "train"]
    assert [x["loss"] for x in ours][: len(before)] == [x["loss"] for x in before]


@pytest.mark.slow
def test_what_two_processes_saved_goes_on_on_eight_devices(straight, tmp_path):
    one, two = straight
    eight, four = tmp_path / "eight", tmp_path / "four"
    shutil.copytree(two, eight)
    shutil.copytree(one, four)
    one_of_two.run(four, 6)
    one_of_two.run(eight, 6, data=4)
    compare(eight, four)
    ours, theirs = arrays(eight, 6), arrays(four, 6)
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_workdir_that_hosts_do_not_share_is_refused_by_all(tmp_path):
    """A folder on each host's own disk: nothing is trained, and none waits for the other."""
    root = pathlib.Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable,
        root / "train.py",
        f"--config={root}/configs/smollm2_135m_dflash.py:tiny",
        "--distributed",
    ]
    changes = ["--config.run.save_every_minutes=inf", "--config.mesh.data=2"]
    shared = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    started = [
        subprocess.Popen(
            [*command, *changes, f"--workdir={tmp_path / str(index)}"], cwd=root, text=True, stderr=subprocess.PIPE,
            env=os.environ | shared | {"JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]  # fmt: skip
    for index, process in enumerate(started):
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 1, errors
        assert f"FATAL {tmp_path / str(index)} is not the same folder for all 2 processes: 1 did not see" in errors
        assert [path.name for path in (tmp_path / str(index)).iterdir()] == []


def test_one_process_changes_nothing():
    target = toy.target()
    assert processes.here(target) is target and processes.is_first()
    assert processes.share([1, 2, 3], None) == [1, 2, 3] and processes.gather([[1], [2, 3]], 2, 5, None) == [
        [1],
        [2, 3],
    ]
    assert processes.in_turn(lambda: 7) == 7 and processes.of_the_first((0.1,)) == (0.1,)


def test_a_view_of_this_process_is_the_same_memory():
    mesh = make_mesh(4, 2)
    params = toy.target(mesh=mesh).params
    ours = sharding.on_this_process(params, mesh)  # all devices are this process's
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(ours), strict=True):
        assert a.sharding == b.sharding
        pointers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in (a, b)]
        assert pointers[0] == pointers[1]


@pytest.mark.parametrize(
    ("data", "tensor", "message"),
    [
        (2, 2, "mesh has 4 devices .* must use all 8 of the 2 processes"),
    ],
)
def test_meshes_that_do_not_suit_the_processes_are_refused(monkeypatch, data, tensor, message):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        from_config.configured_mesh(ConfigDict({"mesh": {"data": data, "tensor": tensor}}))


def test_processes_that_would_train_on_different_things_all_refuse(monkeypatch):
    facts = {"data": {"samples": 12}, "seed": 3}

    def gathered(change):
        def allgather(rows_Nx2):
            other = rows_Nx2.copy()
            other[change] += 1
            return np.stack([rows_Nx2, other])

        return allgather

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for change, name in ((0, r"data is not the same .*: 1 of 2 .* has \{'samples': 12\}"), (1, "seed is not the same")):
        monkeypatch.setattr(processes.multihost_utils, "process_allgather", gathered(change))
        with pytest.raises(ConfigError, match=name):
            processes.check_same(facts, "workdir /w")
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda rows: np.stack([rows, rows]))
    processes.check_same(facts, "workdir /w")


def test_processes_that_find_different_things_on_disk_are_told_so(monkeypatch):
    def sync_global_devices(name):
        raise AssertionError(f"name mismatch ({name})")

    processes.all_done("5 answers")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "sync_global_devices", sync_global_devices)
    with pytest.raises(ConfigError, match=r"'5 answers' is what process 0 says, and not all say so.*hosts share"):
        processes.all_done("5 answers")


@pytest.mark.slow
def test_processes_that_do_not_share_their_data_are_told_so(tmp_path):
    """Each would train on its own half of the answers, and nothing would show it."""
    for process in start_two(tmp_path, "apart"):
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 1 and "data is not the same in all processes: 1 of 2 differ" in errors, errors
    assert not (tmp_path / "checkpoints").exists()
