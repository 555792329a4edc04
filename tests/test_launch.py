"""What the launcher takes, refuses and says. The tables of bad input are run in this process, or all
of one table in one process without torch."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo_memory import storage
from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import dataset, help, rewards
from rloo_memory.settings.arguments import LaunchArguments
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
ROW = b'{"prompt": "Say a."}\n'
ROWS = b'{"prompt": "Say a.", "answer": "a"}\n{"prompt": "Say the long word b.", "answer": "b"}\n'


DATASETS = {
    "unclosed.jsonl": (ROW + b'{"prompt": "b"\r\n' + ROW, ["line 2 is not JSON", "(character 15)"]),
    "list.jsonl": (ROW + b"[1]\n", ["line 2 is [1]", "not an object"]),
    "empty.jsonl": (b"", ["'empty.jsonl': an empty file"]),
    "blank.jsonl": (b"\n\n", ["no rows"]),
    "no_column.jsonl": (b'{"text": "a", "answer": "b"}\n', ["no column 'prompt'", "it has text, answer"]),
    "notes.txt": (b"Say a.\n", ["no dataset by its ending", ".jsonl"]),
    "junk.parquet": (b"junk", ["cannot be read", "Parquet"]),
    "latin.jsonl": (ROW + b'{"prompt": "caf\xe9"}\n', ["line 2 is not UTF-8 (0xe9)"]),
    "mixed.jsonl": (ROW + b'{"prompt": [{"role": "user", "content": "a"}]}\n', ["a list on line 2, text on 1"]),
    "null.jsonl": (ROW + b'{"prompt": null}\n', ["row 2: the prompt is empty"]),
    "spaces.jsonl": (ROW + b'{"prompt": " "}\n', ["row 2: the prompt ' ' is empty"]),
    "texts.jsonl": (b'{"prompt": ["a", "b"]}\n', ["row 1: the prompt is ['a', 'b']", "text or a list of messages"]),
    "no_chat.jsonl": (b'{"prompt": []}\n', ["row 1: the prompt is empty"]),
    "no_role.jsonl": (b'{"prompt": [{"content": "a"}]}\n', ["row 1", "`role` and a `content`"]),
    "silent.jsonl": (b'{"prompt": [{"role": "user", "content": ""}]}\n', ["row 1: no message"]),
    "header.csv": (b"prompt,answer\n", ["no rows"]),
    "ragged.csv": (b"prompt,answer\na,b\nc,d,e\n", ["line 3"]),
    "array.json": (b'[{"prompt": "a"},\n {"prompt": }]\n', ["line 2 is not JSON"]),
    "scalars.json": (b"[1, 2]", ["1 is no object"]),
    "deep.jsonl": (b'{"prompt": ' + b"[" * 100_000 + b"\n", ["line 1"]),
    "surrogate.jsonl": (b'{"prompt": "\\ud800"}\n', ["surrogate"]),
    "folder": (None, ["a folder without a .jsonl"]),
    "not_there.jsonl": (..., ["is not here", "not_there.jsonl)"]),
    "owner/name": (..., ["is not here", "hub:owner/name downloads it"]),
    "./folders": (..., ["is not here", "a folder of such files"]),
    "half_chats.csv": (b'prompt\n"[{""role"": ""user"", ""content"": ""a""}]"\nSay a.\n', ["row 1 and none in row 2"]),
    "numpy.csv": (b"prompt\n\"[{'role': 'user', 'content': 'a'}\n {'role': 'user'}]\"\n", ["row 1", "as JSON"]),
    "": (..., ["has no name"]),
}  # fmt: skip
SEEN_AT_ONCE = {
    "no_such --dataset_name empty.jsonl": ["unknown profile 'no_such'"],
    "constraind": ["constraind", "did you mean constrained"],
    "--max_steps 2": ["name a profile first", "--help"],
    "": ["name a profile first"],
    "balanced --model_name_or_path Qwen/Qwen3-8B": ["not a folder", "hub:Qwen/Qwen3-8B", "random:qwen3-8b"],
    "balanced --model_name_or_path random:": ["names no shape", "random:qwen3-0.6b"],
    "balanced --model_name_or_path ./nofolder": ["'./nofolder' is not a folder here; MODEL_PATH=random"],
    "balanced --dataset rows.jsonl --reward letters --model_name_or_path random:tiny-qwen3": [
        "launch: unknown setting 'dataset'; write dataset_name; unknown setting 'reward'; write reward_funcs, or",
    ],
    "balanced --reward_model_name_or_path owner/name": ["reward model 'owner/name' is not a folder here; hub:owner/"],
    "balanced --reward_funcs hub:owner/name": ["is a model; write --reward_model_name_or_path hub:owner/name"],
    "balanced --algorithm ppo": ["ppo", "rloo, grpo"],
    "balanced --host_allocator": ["host_allocator is True: it must be text"],
    # several at once
    "balanced --algorithm ppo --dataset_name empty.jsonl --model_name_or_path Qwen/Qwen3-8B": [
        "rloo, grpo", "an empty file", "not a folder", "no reward; --reward_funcs module:function",
        "docs/launch.md",
    ],
    "balanced --reward_funcs no/such": ["'no/such' is not module:function", "docs/launch.md"],
    "balanced --reward_funcs my-rewards.py:short": ["letters, digits and _ only; rename it to my_rewards.py"],
    "balanced --reward_funcs my-rewards.py": ["names no function; write my-rewards.py:FUNCTION"],
    "balanced --reward_funcs not_there:short": ["there is no not_there.py in", "PYTHONPATH"],
}  # fmt: skip


def test_a_bad_dataset_reward_or_model_is_named_before_torch_is_imported(tmp_path):
    for name, (text, _) in DATASETS.items():
        if text is None:
            (tmp_path / name).mkdir()
        elif text is not ...:
            (tmp_path / name).write_bytes(text)
    (tmp_path / "my-rewards.py").write_text("")
    given = ["--reward_funcs", "letters", "--model_name_or_path", "random:tiny-qwen3"]
    cases = [(["balanced", "--dataset_name", name, *given], parts) for name, (_, parts) in DATASETS.items()]
    cases += [(words.split(), parts) for words, parts in SEEN_AT_ONCE.items()]
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "probes" / "launch_refusals.py"],
        input=json.dumps([argv for argv, _ in cases]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL_PATH": "", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout)
    for (argv, parts), got in zip(cases, said, strict=True):
        assert got["code"] == 2 and not got["torch"], argv
        assert got["error"].startswith("launch: ") and got["error"].count("\n") == 1, got
        assert all(part in got["error"] for part in parts), (got["error"], parts)


def test_datasets_of_every_kind_are_read(tmp_path, monkeypatch):
    import pandas

    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame([json.loads(line) for line in ROWS.splitlines()])
    Path("folder").mkdir()
    for name in ("a.jsonl", "folder/train.jsonl"):
        Path(name).write_bytes(ROWS)
    Path("a.json").write_text(json.dumps(frame.to_dict("records")))
    frame.to_csv("a.csv", index=False)
    frame.to_parquet("a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "folder"):
        rows = dataset.load(LaunchArguments(dataset_name=name))
        assert rows.column_names == ["prompt", "answer"] and rows["answer"][:] == ["a", "b"], name
    Path("folder/test.jsonl").write_bytes(ROW)
    assert len(dataset.load(LaunchArguments(dataset_name="folder", dataset_train_split="test"))) == 1
    with pytest.raises(ConfigError, match="Unknown split .*; name a dataset_train_split that it has"):
        dataset.load(LaunchArguments(dataset_name="a.csv", dataset_train_split="test"))
    chats = [[{"role": "user", "content": text}] for text in ('Say "a".', "It's b.")]
    for name, write in (("json.csv", json.dumps), ("python.csv", str)):  # pandas writes a list as Python does
        frame.assign(prompt=[write(chat) for chat in chats]).to_csv(name, index=False)
        assert dataset.load(LaunchArguments(dataset_name=name))["prompt"][:] == chats


REWARDS = """
def good(completions, answer, **kwargs): return [0.0] * len(completions)
def narrow(completions): return []
def greedy(completions, solution, **kwargs): return []
class Kind: pass
"""
REFUSED = {  # after the dataset and the model's name are found good
    "balanced --max_step 2 --beat 1": ["'max_step'; did you mean max_steps?", "'beat'; did you mean beta?"],
    "balanced --max_steps many": ["launch: max_steps is 'many': it must be a whole number"],
    "balanced --lr_scheduler_type never": ["never"],
    "balanced --num_generations 3": ["num_generations", "3"],
    "balanced --learning_rate nan": ["learning_rate is 'nan'", "finite"],
    "balanced --epsilon 0.2 --delta 0.3": ["launch: delta: no setting of rloo here"],
    "balanced stray --max_steps 2": ["launch: 'stray': no setting; write --name value"],
    "constrained --use_cpu": ["activation_offloading", "no GPU", "--activation_offloading false"],
    "balanced --algorithm grpo --loss_type best": ["loss_type is 'best'", "dapo"],
    "balanced --deepspeed none.json": ["deepspeed"],
    "balanced --model_name_or_path elsewhere": ["MODEL_PATH is 'model' and --model_name_or_path 'elsewhere'"],
    "balanced --use_peft --lora_dropout 0.1": ["lora_dropout is 0.1", "--lora_dropout 0"],
    "balanced --attn_implementation flash_attention_2": ["'flash_attention_2'", "--attn_implementation sdpa"],
    "balanced --use_vllm true": ["the package vllm, which is not installed"],
    "balanced --eval_strategy steps": ["eval_strategy is 'steps'", "no dataset to evaluate on"],
    "balanced --steps_per_generation 1 --num_generations 16 --per_device_train_batch_size 4": [
        "generation_batch_size (4)", "set --steps_per_generation as well",
    ],
    "balanced --memory_snapshot peek": ["memory_snapshot is 'peek': choose one of peak, oom"],
    "balanced --memory_snapshot oom": ["memory_snapshot 'oom' needs a GPU"],
    "balanced --offload_reward true": ["launch: offload_reward is on, but there is no reward_model_name_or_path"],
    "balanced --offload_reference true": ["offload_reference", "no reference (beta is 0)"],
    "balanced --use_peft --beta 0.1 --offload_reference true": ["no reference (LoRA needs none)"],
    "balanced --output_dir taken": ["cannot make output_dir 'taken'", "another folder"],
    "balanced --output_dir new --resume_from_checkpoint model": [
        "'model' is no checkpoint", "trainer_state.json", "new holds no checkpoint",
    ],
    "balanced --output_dir new --resume_from_checkpoint true": ["'new' holds no checkpoint-N"],
    "balanced --dataset_name rows.jsonl --reward_funcs my_rewards:god": ["'my_rewards:god'", "no attribute 'god'"],
    "balanced --dataset_name rows.jsonl --reward_funcs my_rewards:Kind": ["name a function"],
    "balanced --dataset_name rows.jsonl --reward_funcs my_rewards.py:narrow": [
        "cannot be called", "'prompts'", "**kwargs",
    ],
    "balanced --dataset_name rows.jsonl --reward_funcs my_rewards:greedy": [
        "'solution'", "log_metric, answer", "def greedy(",
    ],
    "balanced --dataset_name rows.jsonl --reward_funcs ../elsewhere/far_rewards.py:god": ["no attribute 'god'"],
    "balanced --reward_funcs ../elsewhere/nothing.py:good": [
        "there is no nothing.py in", "/elsewhere or on PYTHONPATH",
    ],
    "balanced --reward_funcs my_broken:good": ["SyntaxError", "python -c 'import my_broken'"],
    "balanced --dataset_name rows.jsonl --reward_funcs my_rewards:good --max_prompt_tokens 5": [
        "'rows.jsonl': row 2", "max_prompt_tokens 5", "plan again with --prompt",
    ],
    "balanced --prompt_tokens 64 --max_prompt_tokens 63": ["'builtin': row 1: the prompt has 64 tokens"],
    "balanced --prompt_tokens 4": ["4 leaves no room"],
    "balanced --steps_per_generation 6 --dataset_name rows.jsonl --reward_funcs my_rewards:good": [
        "'rows.jsonl': it has 2 prompts, and 3 are generated for at a time", "lower steps_per_generation",
    ],
    "balanced --num_generations 100000000": ["launch: num_generations is 100000000", "at most 4096"],
    "balanced --num_generations=1 --top_p 2": ["num_generations is 1", "top_p is 2"],
    "balanced --top_k -1": ["launch: top_k is -1", "--top_k 0"],
    "balanced --min_p 2 --repetition_penalty 0": ["min_p is 2", "repetition_penalty is 0"],
    'balanced --generation_kwargs {"top_p":2}': ["launch: generation_kwargs: top_p is 2"],
    "balanced --load_in_4bit true": ["launch: load_in_4bit needs use_peft"],
    "balanced --report_to nonsense": ["launch: report_to: nonsense is not supported; choose none or some of"],
    "balanced --report_to wandb": ["wandb is not installed; .venv/bin/python -m pip install wandb"],
    "broken.yaml --max_steps 2": ["launch: broken.yaml, line 1: eval_strategy is 'steps'"],
    "broken.yaml --max_steps 2 --offload_reference true": ["launch: offload_ref", "; broken.yaml, line 1: eval_"],
    "balanced --dataset_name taken.jsonl --reward_funcs letters": ["the column 'completions'", "rename the column"],
    "balanced --dataset_name far.jsonl --reward_funcs letters": [
        "'far.jsonl': row 2: the token '<far>' has the id", "512 rows",
    ],
    "balanced --prompt_tokens 100 --max_completion_length 50000": [
        "'builtin': row 1: a prompt of 100 tokens and max_completion_length 50,000 exceed the model's",
        "positions; --max_completion_length ", "; --anyway trains beyond",
    ],
    "balanced --dataset_name shout.jsonl --reward_funcs letters": [
        "'shout.jsonl': row 2", "the chat template: no shouting",
    ],
}  # fmt: skip


@pytest.mark.torch
def test_the_launcher_refuses_before_any_model_loads(policy, tmp_path, monkeypatch, no_model_loads, refused):
    import transformers

    model = tmp_path / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% if messages[0].role == 'root' %}{{ raise_exception('no shouting') }}{% endif %}" + (
        tokenizer.chat_template
    )
    tokenizer.add_tokens(["<far>"])
    tokenizer.save_pretrained(model)
    (model / "config.json").write_bytes(Path(policy, "config.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", "model")
    Path("rows.jsonl").write_bytes(ROWS)
    chats = [[{"role": role, "content": "a"}] for role in ("user", "root")]
    Path("shout.jsonl").write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    Path("far.jsonl").write_bytes(ROW + b'{"prompt": "Say <far>."}\n')
    Path("taken.jsonl").write_text('{"prompt": "a", "answer": "b", "completions": "old"}')
    Path("broken.yaml").write_text("eval_strategy: steps\nbeta: 0.0\n")
    Path("my_rewards.py").write_text(REWARDS)
    Path("my_broken.py").write_text("def good(:")
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far_rewards.py").write_text(REWARDS)
    Path("taken").write_text("a file")
    for words, parts in REFUSED.items():
        refused(words.split(), *parts)
    monkeypatch.setenv("MODEL_PATH", "random:qwen3-0.5b")
    refused(["balanced"], "did you mean qwen3-0.6b?")


NOT_A_MODEL = (  # file of a model, what is in it, or that it is not there; what is said of it
    ("config.json", b"[1]", "cannot load model 'model': Unrecognized model"),
    ("tokenizer.json", b"{}", "cannot load model 'model': KeyError: 'added_tokens'"),
    ("model.safetensors", b"junk", "cannot load 'model': Error while deserializing header"),
    ("model.safetensors", None, "no file named model.safetensors"),
)
AFTER_LOADING = {
    '--model_init_kwargs {"nonsense":1}': ["cannot load", "unexpected keyword argument 'nonsense'"],
    "--use_peft --lora_dropout 0 --lora_target_modules nonsense": ["Target modules nonsense not found"],
    '--lr_scheduler_kwargs {"a":1}': ["unexpected keyword argument 'a'"],
    "--adam_beta1 2": ["Invalid beta parameter"],
    "--dataset_name rows.jsonl --reward_funcs few_rewards:one": [
        "the reward 'few_rewards:one' returned [1.0]",
        "a list of 8 ",
    ],
}


@pytest.mark.torch
def test_what_only_loading_shows_is_one_line_too(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", "model")
    shutil.copytree(policy, "model")
    Path("rows.jsonl").write_bytes(ROWS)
    Path("few_rewards.py").write_text("def one(completions, **kwargs): return [1.0]")
    usual = "balanced --max_steps 1 --max_completion_length 8 --prompt_tokens 48 --output_dir out --disable_tqdm true"
    usual += " --predict_memory false --report_to none"

    def refused(words, parts):
        code = launch.main([*usual.split(), *words.split()])
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert code == 2 and line.startswith("launch: ") and all(part in line for part in parts), (words, parts, line)

    for words, parts in AFTER_LOADING.items():
        refused(words, parts)
    for name, text, said in NOT_A_MODEL:
        file = Path("model", name)
        whole = file.read_bytes()
        file.unlink() if text is None else file.write_bytes(text)
        refused("", ["cannot load", said])
        file.write_bytes(whole)


@pytest.mark.torch
def test_a_model_limits_the_prompts_by_its_positions_and_by_its_tokens():
    import transformers

    from rloo_memory.launch import model_limits

    small = dict(vocab_size=50, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)

    def positions(kind, **settings):
        return model_limits.positions_of(transformers.AutoConfig.for_model(kind, **{**small, **settings}))

    for kind in ("gpt2", "gpt_neo", "opt", "gptj", "biogpt"):
        more = {"attention_types": [[["global"], 1]], "num_layers": 1} if kind == "gpt_neo" else {}
        more |= {"rotary_dim": 4} if kind == "gptj" else {"word_embed_proj_dim": 8} if kind == "opt" else {}
        assert positions(kind, max_position_embeddings=64, **more) == (64, True), kind
    assert positions("qwen3", max_position_embeddings=64) == (64, False)
    for kind, settings in (("bloom", {}), ("mpt", {}), ("rwkv", {}), ("falcon", {"alibi": True}), ("jamba", {})):
        assert positions(kind, **settings) == (None, False), kind

    def scaled(**rope):
        return positions("llama", max_position_embeddings=64, rope_parameters={"rope_theta": 1e4, **rope})

    assert scaled(rope_type="dynamic", factor=2.0) == (None, False)
    assert scaled(rope_type="linear", factor=2.0) == (128, False)
    assert scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32) == (128, False)
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    assert scaled(rope_type="llama3", factor=2.0, **more) == (64, False)

    gpt2, qwen3 = (
        transformers.AutoConfig.for_model(kind, **small, max_position_embeddings=64) for kind in ("gpt2", "qwen3")
    )
    lengths = dataset.Lengths(60, 7, 9)
    model_limits.check_positions(gpt2, lengths, 4, False)
    model_limits.check_positions(qwen3, lengths, 5, True)
    for hf_config, anyway in ((gpt2, False), (gpt2, True), (qwen3, False)):
        with pytest.raises(ConfigError, match="row 7: .* 64 positions; --max_completion_length 4, or shorten") as said:
            model_limits.check_positions(hf_config, lengths, 5, anyway)
        assert ("--anyway" in str(said.value)) == (hf_config is qwen3)

    def tokenizer(eos, pad):
        return SimpleNamespace(eos_token_id=eos, pad_token_id=pad, convert_ids_to_tokens=lambda token: f"<{token}>")

    model_limits.check_special_tokens(qwen3, tokenizer(1, None), "m")
    for given, said in (
        ((None, 0), "no eos_token"),
        ((1, 50), "pad_token of .* '<50>' .* 50 rows"),
        ((60, 0), "eos_"),
    ):
        with pytest.raises(ConfigError, match=said):
            model_limits.check_special_tokens(qwen3, tokenizer(*given), "m")


BAD_REWARDS = {
    "[1.0]": "of shape (1,); TRL expects a list of 2 finite numbers",
    "[[1.0], [2.0]]": "of shape (2, 1)",
    "['1', '2']": "returned ['1', '2']; TRL expects",
    "None": "returned None",
    "5.0": "returned 5.0",
    "{'a': 1.0, 'b': 2.0}": "returned {'a'",
    "[1.0, float('inf')]": "number 2 is inf",
    "[float('nan'), 1.0]": "number 1 is nan",
}


@pytest.mark.torch
def test_a_reward_has_several_names_and_there_can_be_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some_rewards.py").write_text(REWARDS)
    names = ["some_rewards:good", "some_rewards.good", "some_rewards.py:good", f"{tmp_path}/some_rewards.py:good"]
    asked = LaunchArguments(
        reward_funcs=[*names, "letters", *rewards.OF_TRL], reward_model_name_or_path="hub:owner/one"
    )
    rewards.check(asked)
    found = rewards.rewards_of(asked, ["prompt", "answer", "solution"])
    assert found[0] == "owner/one"
    assert {function.__wrapped__.__name__ for function in found[1:5]} == {"good"}
    said = rewards.in_words(asked, found)
    assert said.startswith(f"reward model owner/one, some_rewards:good ({tmp_path}/some_rewards.py), ")
    assert rewards.LETTERS in said and said.count("trl/rewards/") == 4
    assert rewards.rewards_of(LaunchArguments(reward_model_name_or_path="."), ["completions"]) == ["."]
    from trl.scripts import rloo

    registry = re.search(r"reward_funcs_registry = {(.*?)}", Path(rloo.__file__).read_text(), re.DOTALL)[1]
    assert tuple(re.findall(r'"(\w+)": ', registry)) == rewards.OF_TRL
    overlong = re.search(r"get_soft_overlong_punishment\((.*?)\)", registry)[1]
    assert overlong == ", ".join(f"{name}={value}" for name, value in rewards.OVERLONG.items())


@pytest.mark.torch
def test_rewards_that_trl_cannot_train_on_are_named_in_the_first_call():
    import asyncio

    import torch

    for returned, said in BAD_REWARDS.items():
        with pytest.raises(ConfigError) as caught:
            rewards.check_rewards("m:f", eval(returned), 2, first=True)
        assert str(caught.value).startswith("the reward 'm:f' returned ") and said in str(caught.value), returned
    for good in ([1, None], (True, 0.5), torch.ones(2), [torch.ones(1), 2.0], (float(i) for i in range(2))):
        assert len(rewards.check_rewards("m:f", good, 2, first=True)) == 2
    later = rewards.check_rewards("m:f", [float("nan"), 1.0], 2)
    assert later[1] == 1.0
    with pytest.raises(ConfigError, match="number 1 is -inf"):
        rewards.check_rewards("m:f", [-float("inf"), 1.0], 2)

    async def asked(completions, **given):
        return [1.0] * 3

    with pytest.raises(ConfigError, match="of shape \\(3,\\)"):
        asyncio.run(rewards.checked("m:asked", asked)(completions=["a", "b"]))


@pytest.mark.torch
def test_a_prompt_that_the_tokenizer_makes_nothing_of_is_named(policy):
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    rows = Dataset.from_dict({"prompt": ["Say a.", "b"]})
    lengths = dataset.measure(rows, tokenizer, {}, None)
    assert (lengths.longest, lengths.row, lengths.counted) == (len(tokenizer("Say a.")["input_ids"]), 1, 2)

    class Without:
        def __call__(self, text):
            return {"input_ids": [] if text == "b" else [1]}

    with pytest.raises(ConfigError, match="^row 2: the prompt has no tokens"):
        dataset.measure(rows, Without(), {}, None)


@pytest.mark.torch
def test_models_with_random_weights_are_written_once_and_never_over_one_another(tmp_path, monkeypatch):
    first = launch.policy.random_model("tiny-qwen3", tmp_path)
    written = {path: path.stat().st_mtime_ns for path in Path(first).iterdir()}
    assert launch.policy.random_model("tiny-qwen3", tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in Path(first).iterdir()} == written

    Path(first).rename(tmp_path / "kept")
    make = storage.tempfile.mkdtemp

    def slower(dir):
        (tmp_path / "kept").rename(first)  # another launch has the folder ready while this one still writes
        return make(dir=dir)

    monkeypatch.setattr(storage.tempfile, "mkdtemp", slower)
    assert launch.policy.random_model("tiny-qwen3", tmp_path) == first
    assert {path: path.stat().st_mtime_ns for path in Path(first).iterdir()} == written
    assert [path.name for path in tmp_path.iterdir()] == [Path(first).name]


def test_the_help_needs_nothing_installed_and_lists_everything(tmp_path):
    """In a fresh clone, where the only Python has no packages, from another folder."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "rloo_memory", clone / "rloo_memory", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "launch_single_gpu.sh", clone)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    result = subprocess.run(
        [clone / "launch_single_gpu.sh", "--help"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    guide = (ROOT / "docs" / "launch.md").read_text()
    for text in (result.stdout, guide):
        for name, line in help.profile_lines().items():
            assert name in text and line in text, name
        for field in LaunchArguments.__dataclass_fields__.values():
            assert field.name in text, field.name
            assert str(field.default) in text, field.name
        for word in (*dataset.KINDS, "hub:", "random:", "memory.json", "memory_phases.csv", "130", "143", "**kwargs"):
            assert word in text, word
    for argv in (["--help"], ["balanced", "--help"], ["-h"]):
        assert launch.main(argv) == 0


STARTED = """balanced --dataset_name rows.jsonl --reward_funcs my_rewards:good letters --max_steps 1000
--max_completion_length 8 --gradient_accumulation_steps 2 --output_dir out --report_to none --disable_tqdm true
--predict_memory=false"""


def started(folder):
    return subprocess.Popen(
        [ROOT / "launch_single_gpu.sh", *STARTED.split()],
        cwd=folder,
        env={**os.environ, "MODEL_PATH": "../model", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.torch
def test_it_works_where_the_user_stands_and_a_signal_ends_it_in_one_line(policy, tmp_path):
    """Two at the same time, in a folder that has an `experiments` and a `trl` of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    lengths = [len(tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in ROWS.splitlines()]
    (tmp_path / "model").symlink_to(policy)
    running = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / number.name
        for package in ("rloo_memory", "trl"):
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text("raise ImportError('this is not ours')")
        (folder / "rows.jsonl").write_bytes(ROWS)
        (folder / "my_rewards.py").write_text(REWARDS)
        running[number] = started(folder)
    try:
        for number, process in running.items():
            until((tmp_path / number.name / "out" / "memory.json").exists, process, 240)
            process.send_signal(number)
        for number, process in running.items():
            output, error = process.communicate(timeout=60)
            assert process.returncode == 128 + number, error
            assert re.fullmatch(
                rf"launch: stopped by {number.name} after update \d+; out/memory.json is kept\n", error
            )
            record = json.loads((tmp_path / number.name / "out" / "memory.json").read_text())
            assert record["prompt_tokens"] in lengths and record["settings"]["reward_funcs"][0] == "my_rewards:good"
            start = [line.split()[0] for line in output.splitlines() if not line.startswith("{")]
            assert start == ["host", "model", "data", "reward", "passes", "device", "output"]
            for part in (
                f"2 prompts, the longest {max(lengths)} tokens",
                f"my_rewards:good ({tmp_path / number.name}/my_rewards.py), letters",
            ):
                assert part in output
            assert "4 of the k = 8 completions of a prompt together; 4 x 2 accumulated x 1 device" in output
            assert " = 8 completions of 1 prompt per update" in output
            assert str(tmp_path / number.name / "out") in output
    finally:
        for process in running.values():
            process.kill()


def test_the_passes_are_said_in_groups():
    from rloo_memory.launch.announce import passes

    config = dict(
        num_generations=8,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        world_size=2,
        prefix_sharing=True,
        tokens_per_forward=4096,
    )
    at_most = "16 = 2 whole groups of k = 8 completions in passes of at most 4,096 tokens"
    update = "; 16 x 2 accumulated x 2 devices"
    assert passes(SimpleNamespace(**config)) == at_most + update + " = 64 completions of 8 prompts per update"
    part = SimpleNamespace(**{**config, "per_device_train_batch_size": 2, "tokens_per_forward": None})
    assert passes(part).startswith("2 of the k = 8 completions of a prompt together; 2 x 2 accumulated")
    plain = SimpleNamespace(**{**config, "prefix_sharing": False, "per_device_train_batch_size": 2})
    assert passes(plain).startswith("2 rows together, k = 8, no prefix sharing; 2 x 2 accumulated")


@pytest.mark.torch
def test_memory_that_runs_out_is_said_in_one_line_and_recorded(policy, tmp_path, monkeypatch, capsys, shared_fork):
    """The first update fails: the doctor can still read what is known."""
    from trl import RLOOTrainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PATH", policy)
    compute_loss = RLOOTrainer.compute_loss

    def out_of_memory(*args, **kwargs):
        compute_loss(*args, **kwargs)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore of it")

    monkeypatch.setattr(RLOOTrainer, "compute_loss", out_of_memory)
    words = "balanced --max_steps 1 --max_completion_length 8 --prompt_tokens 48 --output_dir out --disable_tqdm true"
    assert launch.main([*words.split(), "--report_to", "none", "--predict_memory", "false"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("launch: out of memory in phase train of update 1: ") and error.count("\n") == 1, error
    assert "Tried to allocate 2.00 GiB" in error and "rloo-memory doctor out says" in error
    record = json.loads(Path("out", "memory.json").read_text())
    assert record["prompt_tokens"] == 48 and set(record["peaks"]) == {"generate", "score", "train"}
    assert record["out_of_memory"] == "train"


@pytest.mark.torch
def test_quantized_weights_that_are_kept_on_the_host_move_with_their_states(monkeypatch):
    import torch

    from rloo_memory.launch.offload import keep_on_host

    calls = []
    hook = SimpleNamespace(offload=lambda: calls.append("offload"))
    monkeypatch.setattr("accelerate.cpu_offload_with_hook", lambda model, device: (model, hook))
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, device=torch.device("cpu"))
    trainer = SimpleNamespace(accelerator=accelerator, model=torch.nn.Linear(2, 2))
    kept = torch.nn.Linear(2, 2)
    kept.is_quantized = True
    keep_on_host(trainer, kept)
    with torch.no_grad():
        trainer.model(torch.ones(1, 2))  # generation, scoring
    assert calls == []
    trainer.model(torch.ones(1, 2))
    assert calls == ["offload"]
