"""Log-probabilities and gradients of the lean trainer's functions against the untouched ones and a float64 truth.

Both run in one process: without `logits_to_keep` the lean line's `forward` is upstream's, and `batch_generation` is
untouched. Prints the largest absolute errors, scaled by the largest absolute value of the truth.
"""

import json
import sys

from experiments import config as cfg
from experiments.builds import use_fork

use_fork(cfg.ARMS["classic-lean"])

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: E402
from trl.trainer import utils  # noqa: E402

PAD, VOCAB, TEMPERATURE = 0, 211, 0.7
family, dtype = sys.argv[1], getattr(torch, sys.argv[2])
shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
if family in ("llama", "qwen3", "mistral"):
    shape |= dict(num_key_value_heads=2, head_dim=16)
if family == "gpt_neox":
    shape |= dict(max_position_embeddings=128)
torch.manual_seed(0)
truth = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).double()
model = AutoModelForCausalLM.from_config(truth.config).to(dtype)
model.load_state_dict(truth.state_dict())
truth.load_state_dict(model.state_dict())  # the truth has the rounded weights: only the arithmetic differs

context, response = 23, 7
ids = torch.randint(1, VOCAB, (3, context + response))
ids[1, :9] = PAD  # left padding, as the collator gives


def logprobs_and_gradients(model, lean):
    model.zero_grad()
    if lean:
        logits = utils.forward(model, ids, PAD, response + 1).logits[:, :-1]
    else:
        logits = utils.forward(model, ids, PAD).logits[:, context - 1 : -1]
    logits = logits / TEMPERATURE
    logprobs = utils.selective_log_softmax(logits, ids[:, context:])
    (logprobs.sum(1) * torch.tensor([0.5, -1.0, 2.0])).sum().backward()
    return logprobs.detach().double(), torch.cat([p.grad.flatten().double() for p in model.parameters()])


true_logprobs, true_gradient = logprobs_and_gradients(truth, lean=False)


def error(value, true):
    return ((value - true).abs().max() / true.abs().max()).item()


stock, lean = logprobs_and_gradients(model, False), logprobs_and_gradients(model, True)
result = {
    "logprob_error_stock": error(stock[0], true_logprobs),
    "logprob_error_lean": error(lean[0], true_logprobs),
    "gradient_error_stock": error(stock[1], true_gradient),
    "gradient_error_lean": error(lean[1], true_gradient),
}
model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
settings = GenerationConfig(
    max_new_tokens=response, temperature=TEMPERATURE + 1e-7, top_k=0, top_p=1.0, do_sample=True,
)  # fmt: skip
prompts = ids[:, :context]
torch.manual_seed(1)
texts, logits = utils.batch_generation(model, prompts, 2, PAD, settings)
torch.manual_seed(1)
lean_texts, lean_logprobs = utils.batch_generation_with_logprobs(model, prompts, 2, PAD, settings)
result["same_tokens"] = bool(torch.equal(texts, lean_texts))
logprobs = utils.selective_log_softmax(logits, texts[:, context:])
result["sampled_logprob_difference"] = (logprobs - lean_logprobs).abs().max().item()
print(json.dumps(result))
