"""The launcher's output folder: whose it is, which checkpoint a training goes on from, what is said at both ends."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
import two_processes
from accelerate.scheduler import AcceleratedScheduler
from small_profile import small_profile
from transformers import TrainerState

from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import announce, checkpoints, output
from rloo_memory.launch.callbacks import LearningRate
from rloo_memory.storage import owned

# With prefix sharing, two completions of a group of four at a time
PROFILE = small_profile(
    4, 6, prompt_tokens=48, max_steps=2, save_strategy="steps", save_steps=1, predict_memory=False,
    prefix_sharing=True, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
)  # fmt: skip
GO_ON = ["profile.yaml", "--resume_from_checkpoint"]


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    """A folder with a profile and, in the default output folder, a training of two updates with a checkpoint each."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "profile.yaml").write_text(PROFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MODEL_PATH", policy)
        assert launch.main(["profile.yaml"]) == 0
    return folder


@pytest.fixture
def here(trained, policy, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", policy)
    return tmp_path


def test_the_output_of_another_training_is_not_replaced(here, no_model_loads, refused, capsys):
    """Before a model loads; a finished training trains nothing."""
    files = [path for path in here.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    refused(["profile.yaml"], "'trainer_output' holds", "--output_dir trainer_output-2", *GO_ON[1:], "delete")
    Path("copy").mkdir()
    shutil.copy(here / "trainer_output" / "model.safetensors", here / "copy")
    refused([*GO_ON, "trainer_output/checkpoint-1", "--output_dir=copy"], "'copy' holds", "model.safetensors")
    refused([*GO_ON, "trainer_output/checkpoint-9"], "no such folder", "holds checkpoint-2, checkpoint-1")
    with owned(Path("trainer_output")):
        refused([*GO_ON, "true"], "trainer_output is being written by", "--output_dir trainer_output-2")
    assert launch.main([*GO_ON, "true"]) == 0
    assert "finished: trainer_output/checkpoint-2 has reached max_steps 2" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in files} == before


SETTINGS = dict(max_steps=3, save_only_model=False, deepspeed_plugin=None, fsdp=None, process_index=0, world_size=1)


def begins(**settings) -> str | None:
    """The checkpoint that a training with these settings goes on from."""
    with output.taken(SimpleNamespace(**{**SETTINGS, "output_dir": "trainer_output", **settings})) as (checkpoint, _):
        return checkpoint


def test_the_newest_whole_checkpoint_is_taken_and_copies_are_none(here, capsys):
    first, last = (Path("trainer_output", f"checkpoint-{number}") for number in (1, 2))
    for name in ("checkpoint-1-backup", "checkpoint-", "checkpoint-9"):
        shutil.copytree(first, first.with_name(name))
    first.rename("elsewhere")
    first.symlink_to(Path("elsewhere").absolute())
    assert begins(resume_from_checkpoint="true") == str(last)
    assert "not from trainer_output/checkpoint-9: it is a checkpoint-1 under another name" in capsys.readouterr().out
    asked = SimpleNamespace(**SETTINGS, output_dir="trainer_output")
    for name in ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        whole = (last / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], b"", None):
            (last / name).unlink() if damaged is None else (last / name).write_bytes(damaged)
            assert begins(resume_from_checkpoint="true") == str(first)
            assert output.going_on(asked).startswith("go on from checkpoint-1 ")
            said = capsys.readouterr().out.splitlines()[1]
            assert said.startswith(f"begins  not from {last}: ") and name.partition(".")[0] in said, said
        with pytest.raises(ConfigError, match=f"{last}': .*{name.partition('.')[0]}"):
            begins(resume_from_checkpoint=str(last))
        if name == "optimizer.pt":
            assert begins(resume_from_checkpoint="true", save_only_model=True) == str(last)
            assert f"new moments and a new schedule: save_only_model, and {last}" in capsys.readouterr().out
        (last / name).write_bytes(whole)


def test_a_shard_that_is_cut_or_gone_is_named(tmp_path):
    torch.distributed.checkpoint.save({"a": torch.ones(9)}, checkpoint_id=tmp_path, no_dist=True)
    assert not checkpoints.damage(tmp_path / ".metadata")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    assert checkpoints.damage(tmp_path / ".metadata") == "names __0_0.distcp, which is not whole"
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert "names one.safetensors" in checkpoints.damage(tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "deepspeed"])
def test_the_learning_rate_that_is_asked_for_goes_before_that_of_a_checkpoint(wrapped, capsys):
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9)
    given = AcceleratedScheduler(schedule, [optimizer]) if wrapped else schedule
    LearningRate().on_train_begin(SimpleNamespace(learning_rate=0.2), TrainerState(), None, optimizer, given)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.18) and "0.2 in place of the" in capsys.readouterr().out
    schedule.step()  # goes on from there
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.18)


def test_a_full_disk_is_found_among_causes_that_go_round():
    first, second = OSError("it failed"), ValueError("and then this")
    first.__context__, second.__context__ = second, first
    assert not output.is_full(second)
    first.args = ("No space left on device",)
    assert output.is_full(second)


def test_results_may_go_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "./", str(tmp_path), "..", "new/"):
        assert begins(output_dir=folder, resume_from_checkpoint=None) is None
    assert tmp_path.exists() and not Path("new").exists()  # it is as it was
    assert output.free_name(Path(".")) == f"{tmp_path}-2"
    Path("file").touch()
    assert output.free_name(Path("file/below")) == "below-2"
    assert output.free_name(Path("my runs")) == "'my runs-2'", "as a shell takes it"


@pytest.mark.slow
def test_a_training_goes_on_from_the_newest_whole_checkpoint_to_the_same_model(here, capsys):
    """And with its own adapters only. A kill left the newest checkpoint without its last file."""
    straight = Path("trainer_output", "model.safetensors").read_bytes()
    Path("trainer_output", "model.safetensors").unlink()
    Path("trainer_output", "checkpoint-2", "trainer_state.json").unlink()
    record = Path("trainer_output", "memory.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"prompt_tokens": 99}))
    assert launch.main([*GO_ON, "true", "--use_peft", "--lora_dropout", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("launch: ")
    assert launch.main([*GO_ON, "true"]) == 0
    assert "\nbegins  from trainer_output/checkpoint-1\n" in capsys.readouterr().out
    assert Path("trainer_output", "model.safetensors").read_bytes() == straight
    assert json.loads(record.read_text())["prompt_tokens"] == 99  # the longest one was before
    phases = pandas.read_csv("trainer_output/memory_phases.csv")
    steps = list(phases.step[phases.phase == "optimizer"])
    assert steps == [1, 2, 3]  # the lost one, too


@pytest.mark.parametrize("dtype, rate", [("bfloat16", 1e-6), ("float32", 1e-6), ("bfloat16", 1e-2)])
def test_that_updates_round_to_nothing_is_said_exactly_where_adam_moves_few_weights(dtype, rate):
    """The share that the line gives is that of weights which one step of Adam leaves as they are."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200, bias=False).to(getattr(torch, dtype))  # up to 0.07
    args = SimpleNamespace(learning_rate=rate, optim="adamw_torch", bf16=True)
    trainer = SimpleNamespace(model=model, is_deepspeed_enabled=False, is_fsdp_enabled=False, args=args)
    share = announce.rounded_away(trainer)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(before.shape).to(before.dtype)
    torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0).step()
    same = (model.weight == before).float().mean().item()
    assert share == pytest.approx(same if same > 0.5 else 0, abs=0.03)


@pytest.mark.slow
def test_of_two_processes_the_first_decides_and_both_end(here, policy):
    words = ("-m", "rloo_memory.launch"), here / "profile.yaml", "--output_dir", here / "trainer_output"
    code, text = two_processes.launched("ddp", *words, MODEL_PATH=policy)
    assert code and text.count("holds the output of another") == 1, text[-3000:]
