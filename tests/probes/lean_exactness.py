"""Log-probabilities and gradients of the lean trainer's functions against the untouched ones and a float64 truth.

Both run in one process: without `logits_to_keep` the lean line's `forward` is upstream's, and `batch_generation` is
untouched. Prints the largest absolute errors, scaled by the largest absolute value of the truth.
"""

import json

from experiments.arms import ARMS
from experiments.builds import use_fork

use_fork(ARMS["classic-lean"])

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config  # noqa: E402
from trl.trainer import utils  # noqa: E402

PAD, VOCAB, TEMPERATURE = 0, 211, 0.7
CONTEXT, RESPONSE = 23, 7


def models(dtype):
    """(float64, `dtype`): the truth has the rounded weights, so only the arithmetic differs."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    truth = AutoModelForCausalLM.from_config(config).double()
    model = AutoModelForCausalLM.from_config(truth.config).to(dtype)
    model.load_state_dict(truth.state_dict())
    truth.load_state_dict(model.state_dict())
    return truth, model


def logprobs_and_gradients(model, ids, lean):
    model.zero_grad()
    if lean:
        logits = utils.forward(model, ids, PAD, RESPONSE + 1).logits[:, :-1]
    else:
        logits = utils.forward(model, ids, PAD).logits[:, CONTEXT - 1 : -1]
    logprobs = utils.selective_log_softmax(logits / TEMPERATURE, ids[:, CONTEXT:])
    (logprobs.sum(1) * torch.tensor([0.5, -1.0, 2.0])).sum().backward()
    return logprobs.detach().double(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


def error(value, true):
    return ((value - true).abs().max() / true.abs().max()).item()


def compare(dtype):
    truth, model = models(dtype)
    ids = torch.randint(1, VOCAB, (3, CONTEXT + RESPONSE))
    ids[1, :9] = PAD  # left padding, as the collator gives
    true_logprobs, true_gradient = logprobs_and_gradients(truth, ids, lean=False)
    result = {}
    for name, lean in (("stock", False), ("lean", True)):
        logprobs, gradient = logprobs_and_gradients(model, ids, lean)
        result[f"logprob_error_{name}"] = error(logprobs, true_logprobs)
        result[f"gradient_error_{name}"] = error(gradient, true_gradient)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    settings = GenerationConfig(
        max_new_tokens=RESPONSE, temperature=TEMPERATURE + 1e-7, top_k=0, top_p=1.0, do_sample=True
    )
    prompts = ids[:, :CONTEXT]
    torch.manual_seed(1)
    texts, logits = utils.batch_generation(model, prompts, 2, PAD, settings)
    torch.manual_seed(1)
    lean_texts, lean_logprobs = utils.batch_generation_with_logprobs(model, prompts, 2, PAD, settings)
    result["same_tokens"] = bool(torch.equal(texts, lean_texts))
    logprobs = utils.selective_log_softmax(logits, texts[:, CONTEXT:])
    result["sampled_logprob_difference"] = (logprobs - lean_logprobs).abs().max().item()
    return result


print(json.dumps({name: compare(getattr(torch, name)) for name in ("float64", "float32", "bfloat16")}))
