"""What the launcher takes, refuses and says."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from huggingface_hub import constants
from transformers import Qwen2_5_VLConfig

from experiments.checks.tiny_families import tiny_config
from rloo_memory.errors import ConfigError
from rloo_memory.host_allocator import LIBRARIES
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import dataset, gate, help, policy, rewards
from rloo_memory.models import load_config
from rloo_memory.settings.arguments import LaunchArguments, TrainerAdditions
from rloo_memory.shapes import SHAPES
from tests.waiting import until
from trl import RLOOTrainer

ROOT = Path(__file__).resolve().parent.parent
ROWS = b'{"prompt": "Say a.", "answer": "a"}\n{"prompt": "Say the long word b.", "answer": "b"}\n'
QUICK = "balanced --max_steps 1 --max_completion_length 8 --prompt_tokens 48 --output_dir out --disable_tqdm true"
QUICK += " --predict_memory false --report_to none"
REWARDS = """
def good(completions, answer=None, **kwargs): return [0.0] * len(completions)
def few(completions, **kwargs): return [1.0]
def greedy(completions, solution, **kwargs): return []
"""
OF_ROWS = "balanced --dataset_name rows.jsonl --reward_funcs my_rewards:good"
NO_ROWS = ("nothing.jsonl", "nothing.json", "nothing.csv", "header.csv", "nothing.parquet", "nobody")
REFUSED = {
    "constraind": ["constraind", "did you mean constrained"],
    "--max_steps 2": ["name a profile first", "--help"],
    "broken.yaml": ["launch: broken.yaml: unknown setting 'bata'; did you mean beta?"],
    "balanced --max_step 2 --beat 1": ["'max_step'; did you mean max_steps?", "'beat'; did you mean beta?"],
    "balanced --delta 0.3": ["launch: delta is no setting of this algorithm here"],
    "balanced stray --max_steps 2": ["launch: 'stray': no setting; write --name value"],
    "balanced --algorithm grpo --loss_type best": ["loss_type is 'best'", "dapo"],
    "balanced --model_name_or_path Qwen/Qwen3-8B": ["'Qwen/Qwen3-8B' is not a folder here; name one, hub:owner"],
    "balanced --model_name_or_path other": ["--trust_remote_code true runs it"],
    "balanced --model_revision v1": ["model_revision 'v1' is for models of the hub, and 'model' is none"],
    "balanced --model_name_or_path plain": ["the built-in prompts cannot be made tokens", "a dataset of texts ("],
    "balanced --calibration gone": ["launch: calibration gone: [Errno 2] No such file or directory: "],
    "constrained --use_cpu": ["activation_offloading", "no GPU", "--activation_offloading false"],
    "balanced --offload_reference true": ["offload_reference", "no reference (beta is 0"],
    "balanced --output_dir taken": ["cannot write to taken", "choose --output_dir taken-2"],
    "balanced --output_dir=": ["output_dir is empty"],
    "balanced --host_allocator jemalloc": ["LD_PRELOAD=libjemalloc.so.2"],
    "balanced --host_allocator tcmaloc": ["'tcmaloc'", "tcmalloc"],
    "balanced --dataset_name rows.jsonl": ["no reward; --reward_funcs module:function"],
    "balanced --dataset_name owner/name --reward_funcs letters": ["is not here", "or hub:owner/name"],
    "balanced --dataset_name other.jsonl --reward_funcs letters": ["no column 'prompt'; it has text, answer"],
    "balanced --dataset_name half.csv --reward_funcs letters": ["'half.csv': row 2: the prompt is no chat"],
    "balanced --dataset_name empty.jsonl --reward_funcs letters": ["'empty.jsonl': row 2", "the prompt is empty"],
    "balanced --dataset_name kinds.jsonl --reward_funcs letters": ["'kinds.jsonl': row 1 is text and row 2 is a chat"],
    "balanced --dataset_name none.jsonl --reward_funcs letters": ["'none.jsonl': row 2: the prompt is None; write"],
    "balanced --dataset_name roles.jsonl --reward_funcs letters": ["row 1: the prompt is [{'content': 'a'}]; write"],
    "balanced --dataset_name latin.jsonl --reward_funcs letters": ["'latin.jsonl': it is not UTF-8", "save it as UTF"],
    "balanced --dataset_name latin.csv --reward_funcs letters": ["'latin.csv': it is not UTF-8", "save it as UTF-8"],
    "balanced --dataset_name mixed --reward_funcs letters": ["'mixed': b.jsonl: ", "answer", "string", "int64"],
    "balanced --reward_model_name_or_path owner/name": ["reward model 'owner/name' is not a folder here; hub:owner/"],
    "balanced --reward_funcs my_rewards:greedy": ["'solution'", "log_metric, each by name", "def score("],
    "balanced --reward_funcs builtins:min": ["'builtins:min' cannot be called as TRL calls it"],
    "balanced --reward_funcs ../elsewhere/nothing.py:good": ["No module named 'nothing'", "/elsewhere and on PYTHON"],
    "balanced --reward_funcs my_exit:good": ["SystemExit: 0", "python -c 'import my_exit'"],
    "balanced --top_k -3": ["top_k is -3: it must be 0, which takes all, or more"],
    "balanced --ref_model_sync_steps 0": ["ref_model_sync_steps is 0: it must be at least 1"],
    "balanced --seed -1": ["seed is -1: it must be from 0 to 4294967295"],
    "balanced --report_to nothing": ["report_to nothing: none of those that are installed here (", "--report_to none"],
    "balanced --eval_strategy epoch": ["eval_strategy: the launcher has no evaluation dataset; leave it out"],
    "balanced --save_strategy best": ["save_strategy best: the launcher has no evaluation dataset"],
    "balanced --use_peft --lora_target_modules x_proj": ["adapters: Target modules x_proj not found in the base"],
    "balanced --use_peft --lora_modules_to_save score": ["lora_modules_to_save score: the model has no module of"],
    f"{OF_ROWS} --dataset_name own.jsonl": ["'own.jsonl' has the column 'completions'", "rename the column"],
    "balanced --load_in_4bit": ["load_in_4bit is on, and such weights cannot be trained", "LoRA: --use_peft true"],
    "balanced --attn_implementation eagre": ["attn_implementation 'eagre': ", "sdpa"],
    "balanced --output_dir /proc/new": ["cannot write to /proc/new", "choose --output_dir new-2"],
    "balanced --predict_memory false --calibration run": ["calibration corrects a prediction, and predict_memory is"],
    "balanced --model_init_kwargs x": ["model_init_kwargs is 'x': it must be a mapping"],
    "balanced --dataset_name rows.jsonl.gz --reward_funcs letters": ["it ends in '.gz': unpack or convert it"],
    **{f"balanced --dataset_name {name} --reward_funcs letters": [f"{name!r}: it has no rows"] for name in NO_ROWS},
    "balanced --model_name_or_path more": ["11 are not there, such as model.layers.2.", "take the config"],
    "balanced --model_name_or_path fewer": ["11 are of layers that it has not, such as model.layers.1."],
    "balanced --model_name_or_path wider": ["have another size, such as model.layers.0.mlp.down_proj.weight"],
    "balanced --model_name_or_path torn": ["'torn': model.safetensors.index.json: Expecting value"],
    "balanced --model_name_or_path strange": ["its model type 'strange' is none that transformers", "if the type is"],
    f"{OF_ROWS} --max_prompt_tokens 5": ["'rows.jsonl': row 2", "max_prompt_tokens 5"],
    f"{OF_ROWS} --steps_per_generation 6": ["2 in it, and 3 prompts are generated for at a time"],
}

CONFIGS = {
    "more": {"num_hidden_layers": 3},
    "fewer": {"num_hidden_layers": 1},
    "wider": {"intermediate_size": 999},
    "strange": {"model_type": "strange"},
}


@pytest.fixture
def here(policy, tmp_path, monkeypatch):
    """A folder with a model, datasets and rewards, where the user stands."""
    shutil.copytree(policy, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.setenv("MODEL_PATH", "model")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    Path("rows.jsonl").write_bytes(ROWS)
    Path("my_rewards.py").write_text(REWARDS)
    return tmp_path


def test_bad_input_is_one_line_with_its_name_before_a_model_loads(here, no_model_loads, refused, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *command: pytest.fail("a program that calls the launcher is replaced"))
    config = {"model_type": "other", "auto_map": {"AutoConfig": "configuration_other.Other"}}
    for folder in ("other", "mixed", "nobody"):
        Path(folder).mkdir()
    of_model = json.loads(Path("model", "config.json").read_text()) | {"layer_types": None}
    for folder, wrong in CONFIGS.items():
        shutil.copytree("model", folder)
        Path(folder, "config.json").write_text(json.dumps(of_model | wrong))
    # Beside a single file, nobody reads an index
    Path("wider", "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    for folder in ("plain", "torn"):
        shutil.copytree("model", folder)
    Path("torn", "model.safetensors").rename("torn/model.safetensors.index.json").write_text("")
    Path("plain", "chat_template.jinja").unlink()
    for name, text in {"latin.jsonl": '{"prompt": "ä"}', "latin.csv": "prompt\nä"}.items():
        Path(name).write_text(text, "latin-1")
    for name, text in {
        "other.jsonl": '{"text": "a", "answer": "b"}',
        "own.jsonl": '{"prompt": "a", "completions": "b"}',
        "half.csv": 'prompt\n"[{""role"": ""user"", ""content"": ""a""}]"\nSay a.\n',
        "empty.jsonl": '{"prompt": "a"}\n{"prompt": ""}',
        "kinds.jsonl": '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}',
        "none.jsonl": '{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": null}',
        "roles.jsonl": '{"prompt": [{"content": "a"}]}',
        "mixed/a.jsonl": '{"prompt": "a", "answer": "b"}',
        "mixed/b.jsonl": '{"prompt": "a", "answer": 1}',
        "broken.yaml": "bata: 1\n",
        "rows.jsonl.gz": "",
        **dict.fromkeys(("nothing.jsonl", "nothing.json", "nothing.csv", "nothing.parquet"), ""),
        "header.csv": "prompt,answer\n",
        "my_exit.py": "import sys\nsys.exit(0)",
        "taken": "a file",
        "other/config.json": json.dumps(config),
        "other/configuration_other.py": "open('ran', 'w')\nclass Other: pass",
    }.items():
        Path(name).write_text(text)
    for words, parts in REFUSED.items():
        refused(words.split(), *parts)
    with pytest.raises(ConfigError, match="'other': it has code of its own"):  # as plan and doctor read it
        load_config("other")
    assert not Path("ran").exists()


AFTER_LOADING = {
    "--use_peft --lora_dropout 0.1": "or for adapters `lora_dropout=0.0`",
    "--reward_funcs my_rewards:few": "the reward 'my_rewards:few' returned [1.0]; TRL expects a list of 8 finite",
    "": "cannot load model 'model': model.safetensors: Error while deserializing header",  # of weights that are cut
}


@pytest.mark.slow
def test_what_only_loading_shows_is_one_line_too(here, capsys):
    for words, said in AFTER_LOADING.items():
        if not words:
            Path("model", "model.safetensors").write_bytes(b"junk")
        code = launch.main([*QUICK.split(), *words.split()])
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert code == 2 and line.startswith("launch: ") and said in line, (words, line)


def test_datasets_of_every_kind_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame([json.loads(line) for line in ROWS.splitlines()])
    Path("folder").mkdir()
    for name in ("a.jsonl", "folder/train.jsonl"):
        Path(name).write_bytes(ROWS)
    Path("marked.jsonl").write_bytes(b"\xef\xbb\xbf" + ROWS)
    Path("a.json").write_text(json.dumps(frame.to_dict("records")))
    frame.to_csv("a.csv", index=False)
    frame.to_parquet("a.parquet")
    Path("inside.json").write_text(json.dumps({"data": frame.to_dict("records")}))
    frame.to_csv("semicolons.csv", index=False, sep=";")
    for name in ("a.jsonl", "marked.jsonl", "a.json", "inside.json", "a.csv", "semicolons.csv", "a.parquet", "folder"):
        rows = dataset.load(LaunchArguments(dataset_name=name))
        assert rows.column_names == ["prompt", "answer"] and rows["answer"][:] == ["a", "b"], name
    Path("folder/train-2.jsonl").write_text('{"prompt": "NA", "answer": null}')
    assert dataset.load(LaunchArguments(dataset_name="folder"))["answer"][:] == [None, "a", "b"]
    Path("words.csv").write_text("prompt,answer\nNA,\n")
    assert dataset.load(LaunchArguments(dataset_name="words.csv"))[0] == {"prompt": "NA", "answer": ""}
    chats = [[{"role": "user", "content": text}] for text in ('Say "a".', "It's b.")]
    for name, write in (("json.csv", json.dumps), ("python.csv", str)):  # pandas writes a list as Python does
        pandas.DataFrame({"prompt": [write(chat) for chat in chats]}).to_csv(name, index=False)
        assert dataset.load(LaunchArguments(dataset_name=name))["prompt"][:] == chats


def test_a_reward_has_several_names(here):
    names = ["my_rewards:good", "my_rewards.good", "my_rewards.py:good", f"{here}/my_rewards.py:good"]
    asked = LaunchArguments(
        reward_funcs=[*names, "letters", *rewards.OF_TRL], reward_model_name_or_path="hub:owner/one"
    )
    found = rewards.rewards_of(asked, ["prompt", "answer", "solution"])
    assert found[0] == "owner/one"
    assert {function.__wrapped__.__name__ for function in found[1:5]} == {"good"}
    said = rewards.in_words(asked, found)
    assert said.startswith(f"reward model owner/one, my_rewards:good ({here}/my_rewards.py), ")
    assert said.count("trl/rewards/") == 4


def test_the_help_needs_nothing_installed_and_lists_everything(tmp_path):
    """In a fresh clone, where the only Python has no packages, from another folder."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "rloo_memory", clone / "rloo_memory", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch_single_gpu.sh", clone)
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [clone / "launch_single_gpu.sh", "--help"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    settings = (*LaunchArguments.__dataclass_fields__, *TrainerAdditions.__dataclass_fields__)
    assert all(name in said for name in (*help.profile_lines(), *(f"  --{name} " for name in settings)))


def test_another_malloc_and_the_environment_come_before_what_reads_them():
    """A launcher that starts again would import torch twice."""
    code = "import sys, rloo_memory.launch.__main__; sys.exit(len({'torch', 'datasets'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_another_malloc_is_put_in_place_and_one_that_is_not_loaded_is_refused(tmp_path):
    """Before TRL is imported."""
    command = [sys.executable, "-m", "rloo_memory.launch", "balanced", "--host_allocator", "jemalloc"]
    started = dict(env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, text=True)
    (library := tmp_path / LIBRARIES["jemalloc"]).write_text("not a library")
    result = subprocess.run(command, **started, capture_output=True)
    assert result.returncode == 2 and "launch: host_allocator 'jemalloc' is not loaded" in result.stderr
    subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", library], input="int stand_in;", text=True, check=True)
    with subprocess.Popen(command, **started, stdout=subprocess.PIPE) as process:
        said = process.stdout.readline()
        process.kill()
    assert said == f"host allocator: {library}\n"


@pytest.mark.slow
def test_it_works_where_the_user_stands_and_a_signal_ends_it_in_one_line(policy, tmp_path):
    """In a folder that has an `rloo_memory` and a `trl` of its own."""
    for package in ("rloo_memory", "trl"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('this is not ours')")
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    words = f"{QUICK} --max_steps 1000 --dataset_name rows.jsonl --reward_funcs my_rewards:good letters"
    process = subprocess.Popen(
        [ROOT / "launch_single_gpu.sh", *words.split(), "--gradient_accumulation_steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "MODEL_PATH": str(policy), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((tmp_path / "out" / "memory.json").exists, process, 240)
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and error == "launch: stopped by SIGTERM\n", error
    record = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert record["settings"]["reward_funcs"][0] == "my_rewards:good"
    start = [line.split()[0] for line in output.splitlines() if not line.startswith("{")]
    assert start == ["host", "model", "data", "reward", "passes", "device", "output", "share_prompts:"]
    assert f"my_rewards:good ({tmp_path}/my_rewards.py), letters" in output


def test_memory_that_runs_out_is_said_in_one_line_and_recorded(here, monkeypatch, capsys):
    """The first update fails: the doctor can still read what is known."""
    compute_loss = RLOOTrainer.compute_loss

    def out_of_memory(*args, **kwargs):
        compute_loss(*args, **kwargs)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore of it")

    monkeypatch.setattr(RLOOTrainer, "compute_loss", out_of_memory)
    assert launch.main(QUICK.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("launch: out of memory in phase train of update 1 (rloo-memory doctor out says"), error
    assert error.endswith("Tried to allocate 2.00 GiB more of it\n"), error
    record = json.loads(Path("out", "memory.json").read_text())
    assert record["prompt_tokens"] == 48 and record["out_of_memory"] == "train"


@pytest.mark.parametrize("later", [False, True])
def test_what_a_reward_returns_is_checked_also_where_it_is_awaited(later):
    def rewarded(returned):
        async def awaited(completions):
            return returned(completions)

        call = rewards.with_its_rewards_checked("some", awaited if later else returned)
        return asyncio.run(call(completions=["a", "bc"])) if later else call(completions=["a", "bc"])

    assert rewarded(lambda completions: map(len, completions)) == [1, 2]  # which can be read once
    for wrong in (None, [1.0], [1.0, float("nan")], [1.0, 10**400], ["a", "b"]):
        with pytest.raises(ConfigError, match="TRL expects a list of 2 finite numbers"):
            rewarded(lambda completions, wrong=wrong: wrong)
    with pytest.raises(ConfigError, match="'some' ended the program"):
        rewarded(lambda completions: sys.exit())


def test_a_training_without_any_reward_ends_in_its_first_rollout():
    """Later one may be without. A reward model has a number for each completion."""
    nothing, some, returned = torch.full((2, 1), torch.nan), torch.tensor([[1.0], [torch.nan]]), []
    trainer = SimpleNamespace(reward_func_names=["score"], reward_funcs=[rewards.imported])
    trainer._calculate_rewards = lambda *inputs: returned.pop()
    rewards.check_first_rewards(trainer)
    for function, rollouts, line in (
        (rewards.imported, [nothing], "score returned None for all 2"),
        (torch.nn.Identity(), [some], r"reward model score returned \[1.0, nan\]"),
        (rewards.imported, [some, nothing], None),
    ):
        trainer.reward_funcs[0], returned[:] = function, rollouts[::-1]
        with pytest.raises(ConfigError, match=line) if line else contextlib.nullcontext():
            for rollout in rollouts:
                assert trainer._calculate_rewards() is rollout


FAILING = {
    "the gradients are not finite in update 1, so no model is written: lower": lambda loss: loss * math.nan,
    "cannot write to out in update 1: [Errno 28]": lambda loss: os.write(os.open("/dev/full", os.O_WRONLY), b"a"),
}


@pytest.mark.parametrize("said", FAILING)
def test_gradients_that_are_not_finite_and_a_full_disk_end_a_training_in_one_line(here, refused, monkeypatch, said):
    compute_loss, fails = RLOOTrainer.compute_loss, FAILING[said]
    monkeypatch.setattr(RLOOTrainer, "compute_loss", lambda *args, **kwargs: fails(compute_loss(*args, **kwargs)))
    refused(QUICK.split(), said, "and train again" if "written" in said else "make room")
    assert not list(Path("out").glob("model*"))


def test_the_revision_that_is_asked_for_is_planned_and_trained(here, monkeypatch):
    """Of main, the hub's cache has a config of another depth and nothing else."""
    repository, commits = here / "hub" / "models--acme--tiny", {"main": "1" * 40, "v1": "2" * 40}
    (repository / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        (repository / "refs" / name).write_text(commit)
    shutil.copytree("model", repository / "snapshots" / commits["v1"])
    (repository / "snapshots" / commits["main"]).mkdir()
    config = json.loads(Path("model", "config.json").read_text()) | {"num_hidden_layers": 7, "layer_types": None}
    (repository / "snapshots" / commits["main"] / "config.json").write_text(json.dumps(config))
    seen = []

    def predict(settings, model, *rest, **where):
        seen.append(model)
        raise ConfigError("it need not be simulated")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(gate.ask, "predict", predict)
    monkeypatch.setattr(launch, "train", lambda trainer, *rest: seen.append(trainer.model.config))
    words = "--predict_memory true --model_name_or_path hub:acme/tiny --model_revision v1"
    assert launch.main([*QUICK.split(), *words.split()]) == 0
    assert [config.num_hidden_layers for config in seen] == [2, 2]


def test_a_random_model_can_be_multimodal(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(Qwen2_5_VLConfig, text_config={"vocab_size": 300}).to_dict())
    config = SimpleNamespace(trust_remote_code=False, model_init_kwargs=None, deepspeed_plugin=None)
    found = policy.load("random:tiny", config)
    assert found.hf_config.architectures == ["Qwen2_5_VLForConditionalGeneration"] and len(found.tokenizer) == 300
    assert found.hf_config.text_config.eos_token_id == found.tokenizer.eos_token_id


def test_torchs_advice_to_run_a_pickle_is_not_passed_on():
    error = RuntimeError("Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` will")
    assert launch.said(error).startswith("a file of it is a pickle of more than tensors, which could run code")
