"""The launcher's output folder: whose it is, which checkpoint a training goes on from, what is said at both ends."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import two_processes
from small_profile import small_profile

from rloo_memory.errors import ConfigError
from rloo_memory.folder_lock import owned
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import announce, output

PROFILE = small_profile(2, 4, prompt_tokens=48, max_steps=2, save_strategy="steps", save_steps=1, predict_memory=False)


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


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.torch
def test_the_output_of_another_training_is_not_replaced(here, no_model_loads, refused, capsys):
    """Before a model loads, and the remedies that the line names work; a finished training trains nothing."""
    before = contents(here)
    remedies = ["--output_dir trainer_output-2", "--resume_from_checkpoint true", "delete"]
    refused(["profile.yaml"], "'trainer_output' holds", *remedies)
    (here / "copy").mkdir()
    shutil.copy(here / "trainer_output" / "model.safetensors", here / "copy")
    assert "resume" not in refused(["profile.yaml", "--output_dir", "copy"], "model.safetensors")
    another = ["--output_dir=copy", "--resume_from_checkpoint", "trainer_output/checkpoint-1"]
    refused(["profile.yaml", *another], "'copy' holds")
    shutil.rmtree(here / "copy")
    with owned(Path("trainer_output")):
        taken = ["trainer_output is being written by", "--output_dir trainer_output-2"]
        refused(["profile.yaml", "--resume_from_checkpoint", "true"], *taken)
    for words in (["true"], ["trainer_output/checkpoint-2"], ["true", "--max_steps", "1"]):
        assert launch.main(["profile.yaml", "--resume_from_checkpoint", *words]) == 0
        out = capsys.readouterr().out
        assert "finished: trainer_output/checkpoint-2 has 2 updates" in out and "nothing is trained" in out, out
        assert "a higher --max_steps trains on" in out
    assert contents(here) == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


DAMAGE = {  # of a checkpoint -> what is said
    "killed before its end": (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json, which is wr"),
    "killed at its end": (lambda path: cut(path / "trainer_state.json"), "trainer_state.json, which is written last"),
    "weights cut": (lambda path: cut(path / "model.safetensors"), "model.safetensors is cut"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "it has no weights"),
    "optimizer cut": (lambda path: cut(path / "optimizer.pt"), "optimizer.pt is cut"),
    "no optimizer": (lambda path: (path / "optimizer.pt").unlink(), "it has no optimizer state"),
    "no schedule": (lambda path: (path / "scheduler.pt").unlink(), "scheduler.pt is missing"),
}  # fmt: skip


@pytest.mark.torch
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_said(here):
    out = Path("trainer_output")
    assert output.newest_whole(out, False) == (out / "checkpoint-2", "trainer_output/checkpoint-2")
    for name, (damage, why) in DAMAGE.items():
        shutil.copytree(out, name)
        damage(Path(name, "checkpoint-2"))
        found, said = output.newest_whole(Path(name), False)
        assert found == Path(name, "checkpoint-1") and f"checkpoint-2 is not whole, {why}" in said, (name, said)
        with pytest.raises(ConfigError) as refused:
            output.named(Path(name, "checkpoint-2"), Path(name), False)
        assert ("is no checkpoint" in str(refused.value)) == (name == "killed before its end")
        assert name == "killed before its end" or f"--resume_from_checkpoint {name}/checkpoint-1" in str(refused.value)
    Path("no optimizer", "checkpoint-2", "scheduler.pt").unlink()
    assert output.newest_whole(Path("no optimizer"), True)[0].name == "checkpoint-2"  # save_only_model


@pytest.mark.torch
def test_a_resumed_training_says_where_it_begins_and_what_is_different(here, capsys):
    cut(here / "trainer_output" / "checkpoint-2" / "optimizer.pt")
    go_on = ["profile.yaml", "--resume_from_checkpoint", "true"]
    words = ("--learning_rate", "1e-3", "--prompt_tokens", "64")
    assert launch.main([*go_on, *words]) == 0
    out = capsys.readouterr().out
    assert "\nbegins  from trainer_output/checkpoint-1; checkpoint-2 is not whole, optimizer.pt is cut; " in out, out
    assert "learning_rate is 0.001 and was 1e-06; prompt_tokens is 64 and was 48\n" in out, out
    state = json.loads(Path("trainer_output", "checkpoint-2", "trainer_state.json").read_text())
    assert state["global_step"] == 2 and not output.broken(Path("trainer_output", "checkpoint-2"))
    assert launch.main([*go_on, "--max_steps", "3", "--use_peft", "--lora_r", "2"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("launch: trainer_output/checkpoint-2 is of another training: use_peft is True and was ")
    assert not Path("trainer_output", "checkpoint-3").exists()


@pytest.mark.torch
def test_a_record_without_a_model_is_replaced_and_said(here, capsys):
    """As a training leaves it that ran out of memory in its first update."""
    for path in (*Path("trainer_output").glob("checkpoint-*"), *Path("trainer_output").glob("*.safetensors")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert launch.main(["profile.yaml", "--max_steps", "1", "--save_strategy", "no", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "begins  trainer_output/memory.json of an earlier training, which kept no model, is replaced\n" in out
    assert "in bfloat16 most updates round to nothing: at learning_rate 1e-06 one leaves " in out
    assert "in its only log" in out or "at first" not in out


def test_rewards_are_said_that_are_none_not_a_number_or_alone():
    assert announce.rewards_in_words([None, 0.5, float("nan")]) == ", reward none at first, none at last"
    assert announce.rewards_in_words([0.25, None, 0.5]) == ", reward 0.25 at first, 0.5 at last"
    assert announce.rewards_in_words([0.5]) == ", reward 0.5 in its only log"
    assert announce.rewards_in_words([None]) == ", reward none in its only log" and announce.rewards_in_words([]) == ""


@pytest.mark.torch
@pytest.mark.parametrize("dtype, rate, lora", [("bfloat16", 1e-6, False), ("float16", 1e-6, False),
    ("float32", 1e-6, False), ("bfloat16", 1e-2, False), ("bfloat16", 1e-6, True)])  # fmt: skip
def test_that_updates_round_to_nothing_is_said_exactly_where_adam_moves_few_weights(dtype, rate, lora):
    """The share that the line gives is that of weights which one step of Adam leaves as they are."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200, bias=False).to(getattr(torch, dtype))  # up to 0.07
    trained = torch.nn.Linear(4, 4, bias=False) if lora else model
    model.requires_grad_(not lora)
    trainer = SimpleNamespace(
        model=torch.nn.Sequential(model, trained),
        is_deepspeed_enabled=False,
        is_fsdp_enabled=False,
        args=SimpleNamespace(
            learning_rate=rate, optim="adamw_torch", bf16=True, fp16=False, model_init_kwargs={"dtype": dtype}
        ),
    )
    line = announce.rounding(trainer, SimpleNamespace(dtype=dtype))
    before = trained.weight.detach().clone()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, weight_decay=0)
    trained.weight.grad = torch.randn(before.shape).to(before.dtype)
    optimizer.step()
    same = (trained.weight == before).float().mean().item()
    assert bool(line) == (same > 0.5), (line, same)
    if line:
        share = float(line.split("one leaves ")[1].split(" %")[0])
        assert f"in {dtype} " in line and f"learning_rate {rate:g}" in line and "--dtype float32" in line
        assert share == pytest.approx(100 * same, abs=3)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "words, said", [([], "holds the output of another"), (["--resume_from_checkpoint", "true"], "finished: ")]
)
def test_of_two_processes_the_first_decides_and_both_end(here, policy, words, said):
    given = [here / "profile.yaml", "--output_dir", here / "trainer_output", *words]
    code, text = two_processes.launched("ddp", ("tests/probes/launch_left.py",), *given, MODEL_PATH=policy)
    assert (code == 0) == bool(words) and text.count(said) == 1 and "a group is left" not in text, text[-3000:]
    # gloo's threads can abort a process whose interpreter is taken down, now and then
    assert text.count("what is registered for the exit runs") == 2 and "interpreter is taken" not in text, text[-3000:]
