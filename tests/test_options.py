"""Every option of train and suite: what cannot work is refused at once, in one line, and nothing is written."""

import json

import pytest

from experiments import config as cfg
from experiments import record, run_device, suite, train
from experiments.config import RunConfig
from experiments.processes import Launch
from rloo_memory.device import cpu_name, machine_name
from rloo_memory.errors import ConfigError

WHOLE = ("", "two", "1.5", "-1", "nan", str(10**30), "9" * 400)
NUMBER = ("", "much", "nan", "inf", "-inf", "1e999", "-1", "1e300")
NAME = ("", "no-such-name")
SIZE = ("", "lots", "0", "-1GiB", "9" * 400, "nan", "1e400GiB", "4 TiB")
LOCAL = ("", "/no/such/place", "hub:", "a\nb")
MACHINE = ("", ".", "..", "../../x", "a/b", "/x", ".hidden", "a\nb")
OF_A_RUN = {
    "--model": LOCAL, "--documents": LOCAL, "--budget": SIZE, "--steps": (*WHOLE, "0"), "--interval": (*NUMBER, "0"),
    "--precision": NAME, "--threads": (*WHOLE, "0", "100000"), "--batch": (*WHOLE, "0", "3"),
    "--completions-per-forward": WHOLE, "--scale": NAME, "--device": (*NAME, "cuda:x", "cuda:99"),
    "--machine": MACHINE, "--results": ("", "/proc/nowhere"),
}  # fmt: skip
TRAIN = OF_A_RUN | {
    "--arm": NAME, "--k": (*WHOLE, "0", "1"), "--repeat": WHOLE, "--prompt-tokens": (*WHOLE, "15"),
    "--completion-tokens": (*WHOLE, "0"), "--epochs": (*WHOLE, "0"), "--seed": (*WHOLE, str(2**32), str(2**70)),
    "--vocab-size": (*WHOLE, "259"), "--learning-rate": NUMBER, "--temperature": (*NUMBER, "0"), "--reward": NAME,
    "--config": ("", "/no/such/file.json"), "--no-such-option": ("1",),
}  # fmt: skip
SUITE = OF_A_RUN | {
    "--arms": (*NAME, "shared,shared", "shared,", "shared,stokc"), "--k": (*WHOLE, "0", "1", "2,2", "2,,4", "2,two"),
    "--repeats": (*WHOLE, "0"), "--timeout": (*NUMBER, "0"), "--minutes": NUMBER, "--no-such-option": ("1",),
}  # fmt: skip


def refusals(main, usual, option, values, tmp_path, capsys):
    """What each value of `option` is told, one line each."""
    for value in values:
        given = {"--device": "cpu", "--results": str(tmp_path / "results"), **usual, option: value}
        if option == "--config":
            given = {option: value}
        code = main([text for pair in given.items() for text in pair])
        said = capsys.readouterr()
        assert code == 2, f"{option} {value!r} is accepted"
        assert len(said.err.splitlines()) == 1 and not said.out, f"{option} {value!r}: {said.err}"
        assert len(said.err) < 600, f"{option} {value!r}: {said.err}"
        yield value, said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", TRAIN)
def test_train_refuses_what_cannot_work(option, tmp_path, capsys):
    usual = {"--arm": "shared", "--k": "2", "--scale": "test"}
    for value, said in refusals(train.main, usual, option, TRAIN[option], tmp_path, capsys):
        assert said.startswith("train: ")
        if value.isprintable() and not value.startswith("-") and len(value) < 40 and value != "1e300":
            assert value.removesuffix("GiB") in said, "the value is named"


@pytest.mark.parametrize("option", SUITE)
def test_the_suite_refuses_what_cannot_work(option, tmp_path, capsys):
    usual = {"--arms": "shared", "--k": "2", "--scale": "test"}
    for _, said in refusals(suite.main, usual, option, SUITE[option], tmp_path, capsys):
        assert said.startswith("suite: ")


def test_every_option_is_in_the_tables(capsys):
    for main, table in ((train.main, TRAIN), (suite.main, SUITE)):
        with pytest.raises(SystemExit):
            main(["--help"])
        options = {
            word.strip("[],;") for word in capsys.readouterr().out.split() if word.strip("[],;").startswith("--")
        }
        assert options - {"--help", "--fresh", "--print-folder"} == set(table) - {"--no-such-option"}


def test_the_limits_themselves_are_accepted():
    for name, (low, high) in cfg.LIMITS.items():
        for value in (low, high):
            if name not in ("k", "batch"):  # they go together
                assert getattr(cfg.resolve("stock", 2, "test", "cpu", **{name: value}), name) == value
    assert cfg.resolve("stock", 4096, "test", "cpu").batch == 4096


CONFIG = cfg.resolve("stock", 2, "test", "cpu").as_dict()
BROKEN = {
    "a field is missing": {name: value for name, value in CONFIG.items() if name != "seed"},
    "text for a number": {**CONFIG, "k": "2"},
    "outside its limits": {**CONFIG, "seed": -1},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_configuration_that_is_none_is_refused(case, tmp_path, capsys):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(BROKEN[case])
    file = tmp_path / "launch.json"
    file.write_text(json.dumps({"config": BROKEN[case], "machine": str(tmp_path), "token": "x", "parent": None}))
    assert train.main(["--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(file) in said and str(error.value) in said


def test_a_configuration_comes_back_from_its_file_as_it_was(tmp_path):
    config = cfg.resolve("shared", 4, "learn", "cpu", threads=1, budget_bytes=2**30)
    launch = Launch(config, tmp_path / "é x", "token", 7)
    launch.write(tmp_path / "launch.json")
    assert Launch.read(tmp_path / "launch.json") == launch
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    for text in ("", "7", "[]", "{}", '{"config": 1}', "\x00", "[" * 10**5):
        (tmp_path / "launch.json").write_text(text)
        with pytest.raises(ConfigError, match="holds no run"):
            Launch.read(tmp_path / "launch.json")


def test_the_file_is_everything(tmp_path, capsys):
    assert train.main(["--config", str(tmp_path / "x.json"), "--k", "2"]) == 2
    assert "--k is given too" in capsys.readouterr().err


def test_the_machines_folder_is_printed_by_itself(capsys):
    assert run_device.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out == machine_name("cpu", cpu_name()) + "\n"
    assert run_device.main(["--device", "tpu"]) == 2


def test_the_summary_command_wants_a_folder_of_runs(tmp_path, capsys):
    for folder in ("", str(tmp_path), str(tmp_path / "missing")):
        assert record.main([folder]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
