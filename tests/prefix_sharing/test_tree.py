"""Prompts that begin alike, in any way: as a tree, whose nodes go through the model once."""

import kinds
import pytest
import torch
from transformers import GenerationConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from experiments.checks.float64 import pure_float64
from experiments.checks.tiny_families import build, family
from rloo_memory.prefix_sharing import tree
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing, shares_starts
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.images import MultimodalInputs
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses
from rloo_memory.prefix_sharing.tree import MIN_SAVED_TOKENS, Prompts, Tree, common_length
from tests.probes.tiny import build_trainer
from trl import GRPOTrainer, RLOOTrainer

from .conftest import TRAINERS

MODELS = {
    "attention": family("qwen3"),
    "windows": family("gemma3_text"),
    "convolutions": family("lfm2"),
    "delta rule": family("qwen3_next"),
    "experts": family("qwen3_moe"),
}
# Other frequencies for rows of more than 40 tokens, which some nodes and completions are shorter than
LONGROPE = family("phi3", **kinds.LONGROPE | {"original_max_position_embeddings": 40})
WITH_EXPERTS = ("delta rule", "experts")
# Prompts by what they are put together of: a system prompt, two tasks, of one of them two hints, and one that is no
# other's. A word is a run of tokens of its own, of so many
WORDS = {"system": 20, "task": 15, "other task": 9, "hint": 13, "long hint": 18, "end": 5, "e": 1, "alone": 30}
PROMPTS = [
    *(["system", "task", "hint", "end"],) * 3,
    ["system", "task", "hint"],
    ["system", "task", "hint", "alone"],
    *(["system", "task", "long hint", "e"],) * 2,
    ["system", "task", "long hint", "end"],
    *(["system", "other task", "e"],) * 2,
    ["system", "other task", "end"],
    ["alone"],
]
COMPLETIONS = [3, 7, 0, 6, 4, 1, 5, 2, 7, 3, 0, 6]
PROMPT_LENGTH = 20 + 15 + 13 + 30 + 1


@pytest.fixture(autouse=True)
def small_nodes(monkeypatch):
    monkeypatch.setattr(tree, "MIN_SAVED_TOKENS", 10)


def make(name, dtype=torch.float64):
    model = build(LONGROPE if name == "longrope" else MODELS[name]).to(dtype)
    model.set_experts_implementation("eager")  # the others do not know float64
    return model


def make_batch():
    """Left-padded prompts, which all end with the same token, and right-padded completions."""
    generator = torch.Generator().manual_seed(0)
    words = {name: torch.randint(3, 100, (length,), generator=generator) for name, length in WORDS.items()}
    input_ids = torch.zeros(len(PROMPTS), PROMPT_LENGTH + max(COMPLETIONS), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (names, length) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        prompt = torch.cat([*(words[name] for name in names), torch.tensor([2])])
        completion = torch.randint(3, 100, (length,), generator=generator)
        start, end = PROMPT_LENGTH - len(prompt), PROMPT_LENGTH + length
        input_ids[row, start:end] = torch.cat([prompt, completion])
        attention_mask[row, start:end] = 1
    return input_ids, attention_mask


def prompts_of(input_ids, attention_mask):
    return Prompts.of(input_ids[:, :PROMPT_LENGTH], attention_mask[:, :PROMPT_LENGTH])


def loss_of(states, aux_loss, attention_mask):
    has_token = attention_mask[:, PROMPT_LENGTH - 1 :].bool()
    weights = torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)
    loss = ((states * weights).sum(-1).tanh() * has_token).sum()
    return loss if aux_loss is None else loss + aux_loss


def whole_rows(model, input_ids, attention_mask, experts):
    options = {"output_router_logits": True} if experts else {}
    outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask, **options)
    aux_loss = None
    if experts:
        aux_loss = load_balancing_loss_func(outputs.router_logits, 4, 2, attention_mask)
    loss_of(outputs.last_hidden_state[:, PROMPT_LENGTH - 1 :], aux_loss, attention_mask).backward()


def take_gradients(model):
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return gradients


def count_tokens(model):
    """Of each forward, those of recomputation left out."""
    counts = []
    model.get_decoder().register_forward_hook(
        lambda module, args, output: counts.append(output.last_hidden_state.shape[:2].numel())
    )
    return counts


# Ways to put the prompts together, and the tokens that go through the model with them, without those of completions: a
# branch of no token takes one
BUILDERS = {
    "any depth": (Tree.of, 178 + 1),
    "groups of four": (lambda prompts, **kwargs: Tree.of_groups(prompts, 4, **kwargs), 338 + 1),
    "groups behind what is common": (
        lambda prompts, **kwargs: Tree.of_groups(prompts, 4, common_length(prompts, 4), **kwargs),
        None,
    ),
}


class TestTree:
    def test_shape(self):
        prompts = prompts_of(*make_batch())
        found = Tree.of(prompts)
        assert [(branch.rows, branch.start, branch.end) for branch in found.branches] == [
            (list(range(11)), 0, 20),  # the system prompt
            (list(range(8)), 20, 35),  # the task
            ([0, 1, 2, 3, 4], 35, 46),  # the hint, but for two tokens, which the shortest prompt has of its own
            ([0, 1, 2], 46, 53),
            ([5, 6, 7], 35, 52),
            ([5, 6], 52, 54),
            ([8, 9], 20, 30),  # the other task is too short for a node
            ([11], 0, 0),  # nothing is shared
        ]
        assert found.num_tokens == 178
        assert sum(branch.end - branch.start for branch in Tree.of(prompts, every_prompt=True).branches) == 178 - 12
        # As many branches whatever the prompts are
        assert [branch.end for branch in Tree.of_groups(prompts, 4).branches] == [48, 35, 0]
        assert [branch.end for branch in Tree.of_groups(prompts[:8], 4, common_length(prompts[:8], 4)).branches] == [
            33, 48, 35
        ]  # fmt: skip
        assert common_length(prompts[:8], 8) == 0  # of one group

    def test_images(self):
        input_ids, attention_mask = make_batch()
        prompts = [x[:6, :PROMPT_LENGTH] for x in (input_ids, attention_mask)]
        image = int(prompts[0][0, -8])  # of the last tokens of the first prompts
        multimodal = MultimodalInputs([{"pixel_values": torch.tensor([i])} for i in (0, 0, 1)] + [{}] * 3, {})
        found = Tree.of(Prompts.of(*prompts, multimodal, image_token_id=image))
        ends = {row: (branch.rows, branch.end) for row, branch in found.branch_of.items()}
        assert ends[0] == ends[1] == ([0, 1], 53) and ends[2] == ([2], 53)  # whole, and with equal images only
        assert all(branch.end <= 46 or branch.rows in ([0, 1], [2]) for branch in found.branches)
        apart = Tree.of(Prompts.of(*prompts, multimodal, shares_starts=False))
        assert {branch.start for branch in apart.branches} == {0} and len(apart.branches) == 5

    @pytest.mark.parametrize(
        "builder, rows, in_one_backward, gradient_checkpointing",
        [
            pytest.param("any depth", 12, False, True, marks=pytest.mark.slow),
            ("any depth", 1, False, False),
            pytest.param("any depth", 1, True, True, marks=pytest.mark.slow),
            pytest.param("any depth", 4, True, False, marks=pytest.mark.slow),
            ("groups of four", 12, False, False),
            ("groups behind what is common", 1, True, False),
            pytest.param("groups behind what is common", 4, False, True, marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize("name", [*MODELS, "longrope"])
    def test_gradients(self, name, builder, rows, in_one_backward, gradient_checkpointing):
        build, num_tokens = BUILDERS[builder]
        input_ids, attention_mask = make_batch()
        if num_tokens is None:  # with what all begin with
            rows, num_tokens = min(rows, 8), 177
            input_ids, attention_mask = input_ids[:8], attention_mask[:8]
        chunks = [slice(first, first + rows) for first in range(0, len(input_ids), rows)]
        experts = name in WITH_EXPERTS
        with pure_float64():
            model = make(name).train()
            for chunk in chunks:
                whole_rows(model, input_ids[chunk], attention_mask[chunk], experts)
            expected = take_gradients(model)
            enable_prefix_sharing(model)
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            counts = count_tokens(model)
            backward = {"rows_per_backward": rows, "in_one_backward": in_one_backward}
            whole = build(prompts_of(input_ids, attention_mask), **backward)
            for chunk in chunks:
                passes = SharedPrefixPasses(PROMPT_LENGTH, tree=whole, rows=range(12)[chunk])
                ids, mask = input_ids[chunk], attention_mask[chunk]
                output = passes.forward(model.base_model, ids, mask, output_router_logits=experts)
                loss_of(output.last_hidden_state, output.aux_loss, mask).backward()
                in_loss = take_gradients(model) if in_one_backward and chunk is chunks[-1] else {}
                whole.leave(chunk.stop)
        assert not whole.nodes
        behind = take_gradients(model)
        assert not (in_loss and behind)  # the last backward has all gradients
        gradients = in_loss or behind
        assert gradients.keys() == expected.keys()
        # Beside all: what nearly cancels (decays of the delta rule) is 4e-9 apart in rows with and without padding
        scale = torch.cat([x.flatten() for x in expected.values()]).norm()
        errors = {name: float((gradients[name] - x).norm() / scale) for name, x in expected.items()}
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}
        assert sum(counts) == num_tokens + int(attention_mask[:, PROMPT_LENGTH:].sum())

    @pytest.mark.parametrize("name", MODELS)
    def test_scoring_in_chunks(self, name):
        model = make(name, torch.float32).eval()
        input_ids, attention_mask = make_batch()
        enable_prefix_sharing(model)
        whole = Tree.of(prompts_of(input_ids, attention_mask))
        with torch.no_grad():
            expected = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            counts = count_tokens(model)
            for first in range(0, 12, 4):
                rows = slice(first, first + 4)
                passes = SharedPrefixPasses(PROMPT_LENGTH, 20, tree=whole, rows=range(12)[rows])
                states = passes.forward(model.base_model, input_ids[rows], attention_mask[rows]).last_hidden_state
                has_token = attention_mask[rows, PROMPT_LENGTH - 1 :].bool()
                torch.testing.assert_close(
                    states[has_token], expected[rows, PROMPT_LENGTH - 1 :][has_token], rtol=1e-4, atol=1e-5
                )
        assert sum(counts) == 178 + 1 + sum(COMPLETIONS) and not whole.nodes

    def test_other_rows(self):
        # They share among themselves
        model = make("attention").eval()
        input_ids, attention_mask = make_batch()
        enable_prefix_sharing(model)
        whole = Tree.of(prompts_of(input_ids, attention_mask))
        rows = input_ids[1:3], attention_mask[1:3]
        states = SharedPrefixPasses(PROMPT_LENGTH).forward(model.base_model, *rows).last_hidden_state
        for first, kept in ((0, 4), (5, 0), (11, 0)):
            passes = SharedPrefixPasses(PROMPT_LENGTH, tree=whole, rows=[first, first + 1])
            torch.testing.assert_close(passes.forward(model.base_model, *rows).last_hidden_state, states)
            assert len(whole.nodes) == kept
            whole.close()

    @pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", MODELS)
    def test_generate(self, name, attn_implementation):
        model = make(name, torch.float32).eval()
        model.set_attn_implementation(attn_implementation)
        inputs = dict(zip(("input_ids", "attention_mask"), (x[:, :PROMPT_LENGTH] for x in make_batch()), strict=True))
        config = GenerationConfig(max_new_tokens=60, do_sample=False, pad_token_id=0, disable_compile=True)
        expected = model.generate(**inputs, generation_config=config)
        enable_prefix_sharing(model)
        counts = count_tokens(model)
        assert torch.equal(generate_with_shared_prefix(model, **inputs, generation_config=config), expected)
        assert counts[:11] == [20, 15, 11, 7, 2, 32, 17, 2, 6, 10, 14] and counts[11:13] == [30, 12]

    @pytest.mark.parametrize("name", ["gpt2", "beam", "ministral3", "mistral4", "hunyuan_v1_dense"])
    def test_positions_that_are_learned_or_scale_queries(self, name):
        # Rows of other padding have other positions. Some models scale behind thousands of tokens only, and some have
        # norms behind their rotary embeddings, which do nothing in a new model
        model = build(family(name))
        enable_prefix_sharing(model)
        assert not shares_starts(model)

    @pytest.mark.parametrize("rows", [2, 8])
    @pytest.mark.parametrize("trainer_class", TRAINERS)
    def test_train(self, trainer_class, rows):
        # Two prompts an update, which begin alike
        prompts = ["w50 " * 200 + question for question in ("w51 w52", "w53 w54 w55 w56", "w57", "w58 w59")]
        options = {"max_steps": 2, "prefix_sharing": True, "gradient_checkpointing": False}
        options |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
        trainer = build_trainer(trainer_class, self.tmp_dir, "tiny", prompts, **options)
        trainer.prompt_sharing.compared = True  # which scores whole rows
        counts = count_tokens(trainer.model)
        before = {name: param.clone() for name, param in trainer.model.named_parameters()}
        trainer.train()
        assert any(not torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())
        # Once in a generation, once in its training, and in RLOO once in scoring
        assert sum(count > 100 for count in counts) == 2 * (2 + (trainer_class is RLOOTrainer))

    @pytest.mark.parametrize("rows", [2, 8])
    @pytest.mark.parametrize("num_own", [1, 4])  # with the last token, which goes with the completion
    def test_train_on_prompts_of_a_group_that_end_apart(self, num_own, rows, monkeypatch):
        monkeypatch.setattr(tree, "MIN_SAVED_TOKENS", MIN_SAVED_TOKENS)
        generator = torch.Generator().manual_seed(0)
        tasks = {task: torch.randint(10, 100, (300,), generator=generator).tolist() for task in ("w50", "w60")}

        def rollout(prompts, trainer):
            own = [[10 + row] * num_own for row in range(8)]
            return {
                "prompt_ids": [tasks[prompt] + x for prompt, x in zip(prompts, own, strict=True)],
                "completion_ids": [[14 + row, 19, 18 + row, 12] for row in range(8)],
                "logprobs": None,
            }

        trained = []
        for shared in (False, True):
            options = {"learning_rate": 0.1, "optim": "sgd", "model_init_kwargs": {"dtype": "float32"}}
            options |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
            trainer = build_trainer(
                GRPOTrainer,
                self.tmp_dir,
                "tiny",
                list(tasks),
                lambda completion_ids, **_: [ids[0] / 9 for ids in completion_ids],
                {"rollout_func": rollout},
                prefix_sharing=shared,
                **options,
            )
            if shared:
                trainer.prompt_sharing.compared = True
            counts = count_tokens(trainer.model)
            trainer.train()
            trained.append(list(trainer.model.parameters()))
        assert sum(counts) <= 1.1 * (2 * 300 + 8 * (num_own + 4))
        torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-5)
