import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zygote

ROOT = Path(__file__).resolve().parent.parent
# Under nohup, or as a job in the background, what tests start would ignore these as well
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
os.environ["OMP_NUM_THREADS"] = "1"  # several workers share few cores
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"


LONGEST = (  # their files go first: one that begins last, and alone, is waited for
    "test_patches_own_tests", "test_fit_page", "test_prefix_sharing", "test_rounding", "test_model_families",
    "test_plan_extended",
    "test_series", "test_distributed",
    "test_tutorial", "test_train", "test_plan_engine", "test_doctor", "test_profiles",
    "test_package", "test_launch_distributed", "test_shared_images", "test_classic", "test_gate",
)  # fmt: skip


def pytest_collection_modifyitems(items, config):
    place = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    slow = any(item.get_closest_marker("slow") for item in items) and "not slow" not in config.option.markexpr
    if slow:  # they try the whole of it
        items[:] = [item for item in items if not item.get_closest_marker("sample")]


def pytest_collection_finish(session):
    """Each training collects garbage several times, and would look through all that was imported."""
    gc.freeze()


@pytest.fixture(scope="session")
def policy():
    """The folder of a tiny model with random weights, and of its tokenizer."""
    from experiments.config import resolve
    from experiments.workload import run_models
    from rloo_memory import data

    return run_models.prepare(resolve("stock", 2, "test", "cpu"), data.load_documents())[0]


@pytest.fixture
def forbid_loading():
    """Has a monkeypatch fail where a model loads; one of sizes without values may."""
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__

    def only_sizes(cls, folder, **options):
        return pytest.fail("a model loads") if folder else load(cls, folder, **options)

    return lambda patch: patch.setattr(PreTrainedModel, "from_pretrained", classmethod(only_sizes))


@pytest.fixture
def no_model_loads(monkeypatch, forbid_loading):
    forbid_loading(monkeypatch)


@pytest.fixture
def refused(capsys):
    """Runs the launcher in this process, which refuses the words in one line with these parts; returns the line."""
    from rloo_memory.launch import __main__ as launch

    def run(words, *parts):
        code, line = launch.main(words), capsys.readouterr().err
        assert code == 2 and line.startswith("launch: ") and line.count("\n") == 1, (words, line)
        assert all(part in line for part in parts), (words, line, parts)
        return line

    return run


@pytest.fixture
def planned(capsys):
    """Runs the planner's command in this process; returns its exit code and what it said."""

    from rloo_memory.plan import __main__ as plan

    def command(*arguments):
        code = plan.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return command


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """Runs tests/probes/NAME.py, or a module by its name with dots, in its own process, where torch and transformers
    are imported already; returns its exit code and what it said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(zygote.PRELOADED)

    def run(name, *arguments, timeout=600):
        program = name if "." in name else str(ROOT / "tests" / "probes" / f"{name}.py")
        folder = tmp_path_factory.mktemp("process")
        streams = [folder / "stdout", folder / "stderr"]
        for path in streams:
            path.touch()
        argv = [program, *map(str, arguments)]
        process = context.Process(target=zygote.run, args=(argv, *map(str, streams)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            pytest.fail(f"{argv} did not end in {timeout} s")
        stdout, stderr = (path.read_text() for path in streams)
        return SimpleNamespace(returncode=process.exitcode, stdout=stdout, stderr=stderr)

    return run


@pytest.fixture(scope="session")
def train(forked, tmp_path_factory):
    """Runs `python -m experiments.train` at the smallest scale; returns (exit code, record, run folder, stderr). Tests
    that ask for the same run share it: they only read."""

    @functools.cache
    def run(arm="classic-baseline", k=2, *options):
        results = tmp_path_factory.mktemp("results")
        words = f"--arm {arm} --k {k} --scale test --device cpu --results {results} --machine here --threads 1".split()
        result = forked("experiments.train", *words, *options, timeout=300)
        folder = results / "here" / f"{arm}_test_k{k}_r0"
        record = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else None
        return result.returncode, record, folder, result.stderr

    return run


@pytest.fixture
def planner(monkeypatch):
    """The planner answers in this process; what it was asked is kept."""
    from rloo_memory.plan import ask

    asked = []

    def run(question):
        asked.append(question)
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(question)))
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = ask.main()
        return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())

    monkeypatch.setattr(ask, "in_its_own_process", run)
    return asked


@pytest.fixture
def probe(forked):
    """Runs tests/probes/NAME.py on one arm's TRL; returns what it printed as JSON."""

    def run(name, *arguments):
        result = forked(name, *arguments)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.splitlines()[-1])

    return run
