
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    Lfm2Config,
    Qwen3Config,
)

from rloo_memory.prefix_sharing.common_start import MIN_COMMON_TOKENS, CommonStart, common_length
from rloo_memory.prefix_sharing.enabling import enable_prefix_sharing, shares_starts
from rloo_memory.prefix_sharing.generation import generate_with_shared_prefix
from rloo_memory.prefix_sharing.micro_batches import OpenPrefix
from rloo_memory.prefix_sharing.shared_passes import SharedPrefixPasses, prompt_pass

from .test_passes import TRAINERS

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "full attention": Qwen3Config(**SHAPE, head_dim=8),
    "windows": Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "states": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]),
}
COMMON_LENGTH, PROMPT_LENGTH, COMPLETION_LENGTH = 130, 146, 7
TEXT_MODEL_ID = "tiny-Qwen2ForCausalLM-2.5"


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").to(dtype)


def make_batch():
    # Three left-padded prompts that begin alike, with four completions each
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(3, 100, (COMMON_LENGTH,), generator=generator)
    input_ids = torch.zeros(12, PROMPT_LENGTH + COMPLETION_LENGTH, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for group, own in enumerate([7, 12, 3]):
        prompt = torch.cat([common, torch.randint(3, 100, (own,), generator=generator)])
        for row, length in zip(range(4 * group, 4 * group + 4), [3, 7, 0, 6], strict=True):
            completion = torch.randint(3, 100, (length,), generator=generator)
            start, end = PROMPT_LENGTH - len(prompt), PROMPT_LENGTH + length
            input_ids[row, start:end] = torch.cat([prompt, completion])
            attention_mask[row, start:end] = 1
    return input_ids, attention_mask


def loss_of(states, attention_mask):
    has_token = attention_mask[:, PROMPT_LENGTH - 1 :].bool()
    weights = torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)
    return ((states * weights).sum(-1).tanh() * has_token).sum()


def whole_rows(model, input_ids, attention_mask):
    states = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    loss_of(states[:, PROMPT_LENGTH - 1 :], attention_mask).backward()
    return take_gradients(model)


def take_gradients(model):
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return gradients


def count_tokens(model):
    counts = []
    layer = model.get_decoder().layers[0]
    layer.register_forward_hook(lambda module, args, output: counts.append(output.shape[0] * output.shape[1]))
    return counts


def assert_same_gradients(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        # In float64, but rotary embeddings compute in float32, of other positions than behind padding
        assert (gradients[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


class TestCommonStart:
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    @pytest.mark.parametrize("in_one_backward", [False, True])
    @pytest.mark.parametrize("rows", [1, 2, 4, 12])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_gradients_of_an_update(self, name, rows, in_one_backward, gradient_checkpointing):
        model = make(name, torch.float64).train()
        input_ids, attention_mask = make_batch()
        expected = whole_rows(model, input_ids, attention_mask)
        enable_prefix_sharing(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        counts = count_tokens(model)

        start = CommonStart(COMMON_LENGTH, in_one_backward)
        per_prompt = max(1, 4 // rows)
        open_prefix = OpenPrefix(per_prompt, in_one_backward) if per_prompt > 1 else None
        number = len(input_ids) // rows
        for step in range(number):
            if open_prefix is not None:
                open_prefix.enter(step, updates=step == number - 1)
            start.open(is_last=step == number - 1, prompts_go_on=step + per_prompt >= number)
            passes = SharedPrefixPasses(
                PROMPT_LENGTH, group_size=min(rows, 4), open_prefix=open_prefix, common_start=start
            )
            ids, mask = input_ids[step * rows :][:rows], attention_mask[step * rows :][:rows]
            loss_of(passes.forward(model.base_model, ids, mask).last_hidden_state, mask).backward()
            if open_prefix is not None:
                open_prefix.backward()
        start.backward()

        assert_same_gradients(take_gradients(model), expected)
        # What is common, what each prompt has of its own, the last prompt tokens and the completions
        tokens = COMMON_LENGTH + (7 + 12 + 3 - 3) + 12 + 3 * (3 + 7 + 0 + 6)
        assert sum(counts) == tokens

    @pytest.mark.parametrize("name", CONFIGS)
    def test_scoring_in_chunks(self, name):
        model = make(name).eval()
        input_ids, attention_mask = make_batch()
        enable_prefix_sharing(model)
        counts = count_tokens(model)
        start = CommonStart(COMMON_LENGTH)
        start.open()
        with torch.no_grad():
            whole = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            counts.clear()
            for rows in torch.arange(12).split(4):
                passes = SharedPrefixPasses(PROMPT_LENGTH, common_start=start)
                states = passes.forward(model.base_model, input_ids[rows], attention_mask[rows]).last_hidden_state
                has_token = attention_mask[rows, PROMPT_LENGTH - 1 :].bool()
                expected = whole[rows, PROMPT_LENGTH - 1 :]
                torch.testing.assert_close(states[has_token], expected[has_token], rtol=1e-4, atol=1e-5)
        assert counts[0] == COMMON_LENGTH and counts.count(COMMON_LENGTH) == 1

    @pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_generate(self, name, attn_implementation):
        model = make(name).eval()
        model.set_attn_implementation(attn_implementation)
        input_ids, attention_mask = (x[:, :PROMPT_LENGTH] for x in make_batch())
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        config = GenerationConfig(max_new_tokens=60, do_sample=False, pad_token_id=0, disable_compile=True)
        expected = model.generate(**inputs, generation_config=config)
        enable_prefix_sharing(model)
        counts = count_tokens(model)
        assert torch.equal(generate_with_shared_prefix(model, **inputs, generation_config=config), expected)
        assert counts[:4] == [COMMON_LENGTH, 6, 11, 2]

    def test_positions_that_are_learned(self):
        # Rows of other padding have other positions
        config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        enable_prefix_sharing(model)
        assert not shares_starts(model)

    def test_three_levels(self):
        # A prompt behind another behind another leaves what the whole of it leaves
        model = make("states", torch.float64)
        enable_prefix_sharing(model)
        backbone = model.base_model
        ids = torch.arange(3, 33)[None]
        positions = torch.arange(30)
        whole, _ = prompt_pass(backbone, {"input_ids": ids}, positions, backbone)
        part = None
        for columns in positions.split(10):
            part, _ = prompt_pass(backbone, {"input_ids": ids[:, columns]}, columns, backbone, parent=part)
        assert part.size == 30 and len(part.path) == 3
        for key, value in zip(part.read_attention(1), whole.read_attention(1)[0][0].split(10, 2), strict=True):
            torch.testing.assert_close(key[0], value)
        for slot in whole.states_of(2):
            torch.testing.assert_close(part.read(slot), whole.read(slot))

    def test_length(self):
        input_ids, attention_mask = (x[:, :PROMPT_LENGTH] for x in make_batch())
        assert common_length(input_ids, attention_mask) == COMMON_LENGTH
        # Of equal prompts, three tokens stay
        assert common_length(input_ids[:4], attention_mask[:4]) == COMMON_LENGTH + 7 - 3
        # An image ends it
        image = input_ids[0, -COMMON_LENGTH - 7 :][MIN_COMMON_TOKENS + 1].item()
        assert common_length(input_ids, attention_mask, image_token_id=image) <= MIN_COMMON_TOKENS + 1
        input_ids[0, -COMMON_LENGTH - 7 + MIN_COMMON_TOKENS - 1] += 1
        assert common_length(input_ids, attention_mask) == 0

    def test_other_rows(self):
        # Prompts that begin otherwise go through the model whole
        model = make("full attention").eval()
        input_ids, attention_mask = make_batch()
        enable_prefix_sharing(model)
        input_ids[4:8] = input_ids[4:8].roll(1, dims=0).flip(1)
        attention_mask[4:8] = 1
        passes = SharedPrefixPasses(PROMPT_LENGTH, common_start=CommonStart(COMMON_LENGTH))
        without = SharedPrefixPasses(PROMPT_LENGTH)
        states, expected = (x.forward(model.base_model, input_ids, attention_mask) for x in (passes, without))
        assert torch.equal(states.last_hidden_state, expected.last_hidden_state)

    @pytest.mark.parametrize("rows", [2, 8])
    @pytest.mark.parametrize("config_class, trainer_class", TRAINERS)
    def test_train(self, config_class, trainer_class, rows):
        # Two prompts an update, whose tokens go through the model as a tree
        system = "You answer questions about numbers, and begin with what is asked. " * 12
        prompts = [system + question for question in ("What is one?", "What comes behind the two?", "Three", "And 4")]
        trainer = trainer_class(
            model=TEXT_MODEL_ID,
            reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions],
            args=config_class(
                output_dir=self.tmp_dir,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=8 // rows,
                num_generations=4,
                max_completion_length=8,
                max_steps=2,
                prefix_sharing=True,
                gradient_checkpointing=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )
        counts = count_tokens(trainer.model)
        before = {name: param.clone() for name, param in trainer.model.named_parameters()}
        trainer.train()
        assert any(not torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())
        tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL_ID)
        shortest = min(len(tokenizer(prompt)["input_ids"]) for prompt in prompts)
        # Once in a generation, once in its training, where nothing is scored
        assert sum(count > shortest // 2 for count in counts) <= 2 * (2 + 1)
