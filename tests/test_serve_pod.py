"""serve.py on several processes: two with two devices each, on this machine, over both of which the target lies."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest
from serving.tiny_pair import strict_json, terminal
from test_serve import ROOT

from dflash_jax.checkpoints.tokenizer import StreamDecoder
from dflash_jax.decoding.generate import generate
from dflash_jax.serving.run import serve
from dflash_jax.training.dry_run import tiny_target

TOKENS = 40
CONFIG = f"""
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "target": {{"source": "random:tiny", "dtype": "float32"}}, "drafter": {{"source": "random:tiny"}},
        "generation": {{"max_tokens": {TOKENS}, "temperature": 0.0, "logit_bias": {{"0": -1000.0}}}},
        "mesh": {{"fsdp": 2, "tensor": 2}}, "comparison": {{"repeats": 1}},
    }})
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("pod") / "tiny.py"
    path.write_text(CONFIG)
    return path


def environment(**more):
    common = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    return os.environ | common | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir} | more


@pytest.fixture
def start(config):
    """start(*flags): both processes; what is left of them at the end of the test is killed."""
    started = []

    def start(*flags, of_the_second=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, str(ROOT / "serve.py"), f"--config={config}", "--distributed", *flags]
        for index, more in enumerate(((), of_the_second)):
            variables = environment(
                JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index)
            )  # fmt: skip
            with config.with_name(f"errors{index}").open("w") as errors:
                started.append(
                    subprocess.Popen(
                        [*command, *more], env=variables, cwd=ROOT, text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    )
                )  # fmt: skip
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def errors(config, index):
    return config.with_name(f"errors{index}").read_text()


def read_until(process, end):
    """What it writes up to and with `end`."""
    text = ""
    while not text.endswith(end):
        one = process.stdout.read(1)
        assert one, text
        text += one
    return text.removesuffix(end)


def expected(*turns):
    """Answers of plain decoding on one device."""
    target, messages, answers = tiny_target(), [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = target.tokenizer.apply_chat_template(messages)
        (result,) = generate(target, None, [ids], max_tokens=TOKENS, logit_bias={0: -1000.0})
        decoder = StreamDecoder(target.tokenizer)
        answers.append(decoder.push(result.token_ids) + decoder.finish())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def ask(process, line):
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_a_chat_is_that_of_one_process_survives_ctrl_c_and_ends_with_sigterm(start, config):
    first, second = processes = start()
    read_until(first, "> ")
    ask(first, "one")
    answers = [read_until(first, "\n> ")]
    ask(first, "two")
    answers.append(read_until(first, "\n> "))
    assert answers == expected("one", "two")
    ask(first, "/reset")
    read_until(first, "> ")

    ask(first, "three")
    begun = first.stdout.read(1)
    for process in [*processes, second]:  # a terminal sends it to all, and more than once in a chat
        process.send_signal(signal.SIGINT)
    begun += read_until(first, "\n> ")
    assert "stopped" in errors(config, 0)
    (whole,) = expected("three")
    assert whole.startswith(begun.removesuffix("\n")) and len(begun) < len(whole)
    ask(first, "/reset")
    read_until(first, "> ")
    ask(first, "one")
    assert read_until(first, "\n> ") == answers[0]

    time.sleep(1.5)  # longer than a follower listens at a time
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate(timeout=200)
        assert process.returncode == 0, errors(config, 0) + errors(config, 1)
    assert "Traceback" not in errors(config, 0) + errors(config, 1)


@pytest.mark.slow  # programs of a second engine
def test_one_prompt_is_compared_as_by_one_process(start, config):
    stats = config.with_name("stats.json")
    for process in start("--prompt=one", f"--stats_json={stats}"):
        process.communicate(timeout=120)
        assert process.returncode == 0, errors(config, 0) + errors(config, 1)
    several = strict_json(stats.read_text())
    experiment = runpy.run_path(str(config))["get_config"]()
    experiment.mesh.update(fsdp=1, tensor=1)
    alone = serve(experiment, "one", terminal=terminal())
    assert several["identical"] is True and several["devices"] == 4
    for mode in ("plain", "dflash"):
        for name in ("tokens", "rounds", "tau", "histogram", "per_position"):
            assert several[mode][name] == alone[mode][name], (mode, name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt=x", "--stats_json=/nowhere/stats.json"], "--stats_json is '/nowhere/stats.json', which can not be"),
        (["--config.mesh.fsdp=1"], "must use all 4 of the 2 processes"),
    ],
)
def test_what_is_wrong_ends_all_with_it(start, config, flags, message):
    for index, process in enumerate(start(*flags)):
        process.communicate(timeout=200)
        assert process.returncode == 1
        assert message in errors(config, index) and "Traceback" not in errors(config, index)


@pytest.mark.slow  # the first waits for the second, which waits for the first to end, for twenty seconds
def test_a_process_that_fails_alone_ends_the_others(start, config):
    first, second = start("--prompt=one", of_the_second=["--config.target.source=nowhere"])
    for process in (second, first):
        process.communicate(timeout=200)
        assert process.returncode not in (None, 0)
    assert "FATAL nowhere does not exist" in errors(config, 1)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--prompt=x"], {}, "set JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        (["--prompt=x"], {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two', must be a whole number"),
        (["--compile_only", "--topology=v5p:2x2x1"], {}, "--compile_only is one process; leave --distributed out"),
    ],
)
def test_wrong_starts(config, flags, variables, message):
    command = [sys.executable, str(ROOT / "serve.py"), f"--config={config}", "--distributed", *flags]
    ended = subprocess.run(
        command, env=environment(**variables), cwd=ROOT, text=True, capture_output=True, timeout=200, check=False
    )  # fmt: skip
    assert ended.returncode == 1 and message in ended.stderr and "Traceback" not in ended.stderr
