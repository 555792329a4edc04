"""A reward for training a teacher: how likely a student finds the known solution after reading the explanation.

Source: Cetin, Zhao, Tang, "Reinforcement Learning Teachers of Test Time Scaling", arXiv 2506.08388, NeurIPS 2025, and
the authors' code, github.com/SakanaAI/RLT. The policy is the teacher T: it reads question q and solution s and writes
an explanation t. The student S reads q and t and is asked for s. In nats per token,

    r_SS = mean log S(s | t, q) + min_weight min log S(s | t, q)                            over the tokens of s
    r_KL = mean KL(T(. | s, q) || S(. | q)) + max_weight max KL(T(. | s, q) || S(. | q))    over the tokens of t
    reward = r_SS - kl_weight r_KL

r_SS wants an explanation that leads to the solution step by step, r_KL one that the student could have thought of from
the question alone. The default weights are the paper's: alpha = 0.01 for minimum and maximum, and lambda = 3.
Departures from the authors' code:

* the KL is exact, over the whole vocabulary; the code takes log T - log S of the sampled token;
* the temperature is 1, as in the equations; the code divides both models' logits by 0.7, its sampling temperature;
* the explanation is the whole completion; the code takes what stands between tags, and adds -1 where they are missing.

    reward = TeacherStudentReward("Qwen/Qwen3-0.6B")
    trainer = RLOOTrainer(model, reward_funcs=reward, train_dataset=Dataset.from_list(examples()), args=args)
    reward.attach(trainer)  # for a run on a tiny model: examples/teacher_student.py --shared
"""

import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_memory.prefix_sharing.lm_head import causal_lm_of, logits_of

EXAMPLES = Path(__file__).with_name("teacher_student_examples.jsonl")
TEACHER_PROMPT = "Explain step by step how to find the solution.\n\nQuestion: {question}\n\nSolution: {solution}"
CHAT_TEMPLATE = "{explanation}\n\n{solution}"  # the assistant's turn; the question is the user's
PLAIN_TEMPLATE = "Question: {question}\n\nExplanation: {explanation}\n\nAnswer:\n{solution}"
PARTS = ("mean_log_likelihood", "min_log_likelihood", "mean_kl", "max_kl")


class TeacherStudentReward:
    """Reward function for `RLOOTrainer` and `GRPOTrainer`; formula and source stand above.

    The dataset needs the columns `question` and `solution`, and a `prompt` (chat or text) in which the teacher reads
    both. Logits exist for `chunk_tokens` tokens at a time, never for whole sequences.

    Args:
        student: a causal language model, or the path or hub name of one.
        tokenizer (*optional*): the student's. Default: the one beside its weights.
        min_weight, max_weight (`float`): weights of minimum and maximum beside the means, alpha in the paper.
        kl_weight (`float`): lambda in the paper. With 0 no teacher is needed, and the student, which may have another
            tokenizer, reads the explanation as text. Otherwise it reads exactly the tokens that the teacher wrote.
        temperature (`float`): divides both models' logits.
        student_template (`str`, *optional*): ends with `{explanation}`, some text, `{solution}`. With `{question}`
            before them it is all that the student reads. Without, it is the assistant's turn of a chat in which the
            user asks the question. Each part is tokenized on its own: a solution always has the same tokens.
        chunk_tokens, batch_size (`int`): tokens whose logits exist at the same time, and sequences in a forward pass.
        offload (`bool`): the student waits on the CPU and is on the device during a call only.

    `last` holds the last call's `PARTS`, each a list of one value a completion, without a KL only the first two. TRL
    logs their means as `teacher_student/...`. Raises `ValueError` for options and data that cannot give a reward.
    """

    def __init__(
        self,
        student,
        tokenizer=None,
        *,
        min_weight: float = 0.01,
        kl_weight: float = 3.0,
        max_weight: float = 0.01,
        temperature: float = 1.0,
        student_template: str | None = None,
        chunk_tokens: int = 256,
        batch_size: int = 4,
        offload: bool = False,
    ):
        if isinstance(student, str | Path):
            student = AutoModelForCausalLM.from_pretrained(student, dtype="auto")
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(student.config.name_or_path)
        template = student_template or (CHAT_TEMPLATE if tokenizer.chat_template else PLAIN_TEMPLATE)
        parts = re.fullmatch(r"(.*)\{explanation\}(.*)\{solution\}", template, re.DOTALL)
        if not parts or not ("{question}" in parts[1] or tokenizer.chat_template):
            raise ValueError(f"student_template is {template!r}; it must be like {PLAIN_TEMPLATE!r}")
        self.head, self.middle, self.plain = parts[1], _ids(tokenizer, parts[2]), "{question}" in parts[1]
        if not self.plain:
            chat = [{"role": "user", "content": "{question}"}]
            self.head = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + self.head
        self.__name__ = "teacher_student"  # TRL logs `rewards/teacher_student/mean`
        self.student, self.tokenizer, self.offload, self.device = student, tokenizer, offload, student.device
        self.weights = (1, min_weight, -kl_weight, -kl_weight * max_weight)[: 4 if kl_weight else 2]  # of PARTS
        self.temperature, self.chunk_tokens, self.batch_size = temperature, chunk_tokens, batch_size
        self.teacher = self.trainer = None  # set by `attach`; a teacher can also be set alone
        self.teacher_tokenizer, self._unwrap, self._autocast = tokenizer, lambda model: model, nullcontext
        self.last: dict[str, list[float]] = {}

    def attach(self, trainer) -> None:
        """Make the trainer's policy the teacher, as it learns, and its device the student's. Before `train()`."""
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        sharded = trainer.is_fsdp_enabled or (plugin and plugin.zero_stage == 3)
        sees_more = hasattr(trainer.processing_class, "image_processor") or getattr(trainer, "tools", None)
        if self.weights[2:] and (sharded or sees_more):
            reason = "is sharded by FSDP or ZeRO-3" if sharded else "may see images or tools"
            raise ValueError(f"teacher_student cannot compute the KL: the teacher {reason}; set kl_weight=0")
        self.trainer, self.teacher, self.device = trainer, trainer.model, trainer.accelerator.device
        self.teacher_tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        self._unwrap, self._autocast = trainer.accelerator.unwrap_model, trainer.accelerator.autocast

    @torch.no_grad()
    def __call__(
        self, completions, *, question, solution, prompts=None, completion_ids=None, log_metric=None, **kwargs
    ) -> list[float]:
        """Rewards of B completions. `completions` and `prompts` are B texts or chats, `completion_ids` B lists of
        token ids, `question` and `solution` B texts. The KL of an empty explanation is 0."""
        for asked, text in zip(question, solution, strict=True):
            if not text.strip():
                raise ValueError(f"teacher_student: the solution of the question {asked!r} is empty")
        found: list[tuple[float, ...]] = []
        teaching = self._ready(self._teacher(), self._autocast) if self.weights[2:] else nullcontext()
        with self._ready(self.student) as student, teaching as teacher:
            for start in range(0, len(completions), self.batch_size):
                here = slice(start, start + self.batch_size)
                if teacher:
                    explanations = [self._without_end(ids) for ids in completion_ids[here]]
                else:
                    texts = (text if isinstance(text, str) else text[-1]["content"] for text in completions[here])
                    explanations = [_ids(self.tokenizer, text) for text in texts]
                # What the student reads: up to the explanation, the explanation, between, the solution
                heads = [self.head.replace("{question}", asked) for asked in question[here]]
                heads = [_ids(self.tokenizer, head, special=self.plain) for head in heads]
                solutions = [_ids(self.tokenizer, text) for text in solution[here]]
                rows = [(head, t, self.middle, s) for head, t, s in zip(heads, explanations, solutions, strict=True)]
                hidden = student.hidden([[*head, *t, *middle, *s] for head, t, middle, s in rows])
                parts = self._likelihoods(student, hidden, rows)
                if teacher:
                    parts = [*parts, *self._kls(student, hidden, rows, teacher, prompts[here])]
                found += zip(*parts, strict=True)
        self.last = {name: list(x) for name, x in zip(PARTS, zip(*found, strict=True), strict=False)}
        for name, values in self.last.items() if log_metric else ():
            log_metric(f"teacher_student/{name}", sum(values) / len(values))
        return [sum(w * x for w, x in zip(self.weights, parts, strict=True)) for parts in found]

    def _likelihoods(self, student, hidden, rows) -> tuple[list[float], list[float]]:
        """Mean and minimum log-likelihood of each row's solution, nats per token."""
        states = _before(hidden, [(len(head) + len(t) + len(middle), len(s)) for head, t, middle, s in rows])
        targets = torch.tensor([token for *_, s in rows for token in s], device=states.device)[:, None]
        chunks = zip(states.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True)
        values = torch.cat([student.log_probs(state).gather(-1, target)[:, 0] for state, target in chunks])
        values = values.cpu().split([len(s) for *_, s in rows])
        return [x.mean().item() for x in values], [x.min().item() for x in values]

    def _kls(self, student, hidden, rows, teacher, prompts) -> tuple[list[float], list[float]]:
        """Mean and maximum of KL(teacher || student) over each row's explanation, nats per token."""
        options = getattr(self.trainer, "chat_template_kwargs", {})
        asked = [_ids(self.teacher_tokenizer, prompt, special=True, **options) for prompt in prompts]
        taught = teacher.hidden([prompt + t for prompt, (_, t, *_) in zip(asked, rows, strict=True)])
        lengths = [len(t) for _, t, *_ in rows]
        ours = _before(taught, [(len(prompt), length) for prompt, length in zip(asked, lengths, strict=True)])
        theirs = _before(hidden, [(len(head), length) for (head, *_), length in zip(rows, lengths, strict=True)])
        values = []
        for p, q in zip(ours.split(self.chunk_tokens), theirs.split(self.chunk_tokens), strict=True):
            p, q = teacher.log_probs(p), student.log_probs(q).to(p.device)
            values.append((p - q).mul_(p.exp_()).sum(-1))  # in place: each of these is chunk x vocabulary
        values = torch.cat(values).cpu().split(lengths)
        return [x.mean().item() if len(x) else 0.0 for x in values], [max(x.tolist(), default=0.0) for x in values]

    def _without_end(self, ids: list[int]) -> list[int]:
        """The completion without the tokens that end it: in the student's turn they would end that turn."""
        ends = {self.teacher_tokenizer.eos_token_id, self.teacher_tokenizer.pad_token_id}
        ends.update(getattr(self.trainer, "eos_token_ids", ()))
        while ids and ids[-1] in ends:
            ids = ids[:-1]
        return ids

    def _teacher(self):
        if self.teacher is None:
            raise ValueError("teacher_student has no teacher; call attach(trainer), or set kl_weight=0")
        teacher, ids = self._unwrap(self.teacher), self.teacher_tokenizer.get_vocab()
        sizes = [model.config.get_text_config().vocab_size for model in (teacher, self.student)]
        if sizes[0] != sizes[1] or any(ids.get(token, i) != i for token, i in self.tokenizer.get_vocab().items()):
            raise ValueError(
                f"teacher_student cannot compute the KL: teacher {_name(teacher)} ({sizes[0]} tokens) and student "
                f"{_name(self.student)} ({sizes[1]}) have different vocabularies; set kl_weight=0"
            )
        return teacher

    @contextmanager
    def _ready(self, model, autocast=nullcontext):
        """Without dropout and checkpointing, on the device of calls; afterwards as it was, an offloaded student on the
        CPU."""
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            if model is self.student and model.device != self.device:
                model.to(self.device)
            yield _Model(model, self.temperature, autocast)
        finally:
            for module in training:
                module.training = True
            if model is self.student and self.offload:
                model.to("cpu")


class _Model:
    """Hidden states of a causal language model and, for some of them at a time, log-probabilities."""

    def __init__(self, model, temperature: float, autocast=nullcontext):
        self.causal, self.temperature, self.autocast = causal_lm_of(model), temperature, autocast

    def hidden(self, rows: list[list[int]]) -> torch.Tensor:
        """Last hidden states (rows, longest row, hidden size)."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.causal.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=ids.device)
        with self.autocast():
            return self.causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden size) -> (tokens, vocabulary), in float32 or, for a float64 model, float64."""
        with self.autocast():
            logits = logits_of(self.causal, hidden)
        return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature).log_softmax(-1)


def _before(hidden: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """The states that predict `length` tokens from `start` on, of each row: (tokens of all rows, hidden size)."""
    return torch.cat([row[start - 1 : start - 1 + length] for row, (start, length) in zip(hidden, spans, strict=True)])


def _ids(tokenizer, text, special: bool = False, **options) -> list[int]:
    """Token ids of a text, or of a chat up to the assistant's turn."""
    if isinstance(text, str):
        return tokenizer(text, add_special_tokens=special)["input_ids"]
    return tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False, **options)


def _name(model) -> str:
    return model.config.name_or_path or type(model).__name__


def examples() -> list[dict]:
    """24 short questions with solutions: arithmetic, logic, code. `prompt` is a chat that asks the teacher."""
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    return [{"prompt": [{"role": "user", "content": TEACHER_PROMPT.format(**row)}], **row} for row in rows]
