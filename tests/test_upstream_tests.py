"""TRL's own tests on three trees: what passes, what is refused and what is wrong."""

import pytest

from experiments.checks import upstream_tests
from experiments.record import read_csv

TESTS = """
from trl import RLOOConfig

from .testing_utils import is_new_here_available


def config(tmp_path):
    return RLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=2,
                      per_device_train_batch_size=2)


def test_same(tmp_path):
    config(tmp_path)


def test_off(tmp_path):
    assert not getattr(config(tmp_path), "prefix_sharing", False)


def test_refused(tmp_path):
    if getattr(config(tmp_path), "prefix_sharing", False):
        raise ValueError("`prefix_sharing=True` does not support this")


def test_other_release():
    assert is_new_here_available()
"""


@pytest.mark.slow
@pytest.mark.torch
def test_each_test_is_run_untouched_with_options_off_and_with_sharing_forced_on(tmp_path, capsys):
    tests = tmp_path / "clone" / "tests"
    tests.mkdir(parents=True)
    (tests / "__init__.py").touch()
    (tests / "testing_utils.py").write_text("from trl.import_utils import is_new_here_available\n")
    (tests / "test_rloo_trainer.py").write_text(TESTS)
    (tests / "test_grpo_trainer.py").write_text("# trl-internal-testing\n")
    where = ["--results", str(tmp_path), "--machine", "here", "--device", "cpu"]
    assert upstream_tests.main([str(tmp_path / "clone"), *where]) == 4, capsys.readouterr().err
    table = read_csv(tmp_path / "here" / "upstream_tests.csv")
    rows = {row["test"].rpartition("test_")[2]: row for row in table}
    outcomes = {test: (row["untouched"], row["off"], row["forced"]) for test, row in rows.items()}
    passed, failed = ("passed",) * 3, ("failed",) * 3
    on_alone = ("passed", "passed", "failed")
    assert outcomes == {"same": passed, "off": on_alone, "refused": on_alone, "other_release": failed}
    said = capsys.readouterr().out
    assert "4 tests, 3 pass untouched; 3 of these with options off, 1 with sharing\n" in said
    assert said.count("wrong: ") == 1 and "test_off: off passed, forced failed: AssertionError" in said
    assert upstream_tests.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no tests/test_rloo_trainer.py; name a clone" in capsys.readouterr().err
