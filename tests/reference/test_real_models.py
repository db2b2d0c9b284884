"""Two real models against transformers, on the same dequantised weights in fp32.

The reference shares nothing with ours but the file: its config is the publisher's, written down here by hand, its
weights are dequantised by the ``gguf`` package, and the tensors' names and order are mapped here once more. So what
we misread (a base, an epsilon, a window, the order of q and k) is a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

import cutaway
from tests.reference.prompts import PROMPTS

pytestmark = pytest.mark.real
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Published:
    """A model as its publisher states it, and how llama.cpp's converter writes it.

    Attributes:
        config: the settings in ``config.json`` that decide a number.
        ends: ids that end a text: the publisher's, and those llama.cpp ends at by their names.
        metadata: what the file says of the same settings; a converter leaves some out.
        names: a layer's tensors, the file's name → transformers'.
        rotated: whether the rows of q and k are stored with the two halves of a head woven together.
        norm_plus: what the converter adds to the weights of norms.
    """

    config: dict[str, Any]
    ends: frozenset[int]
    metadata: dict[str, Any]
    names: dict[str, str]
    rotated: bool = False
    norm_plus: float = 0.0


_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM2 = Published(
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    ends=frozenset({2, 0}),  # <|im_end|>, <|endoftext|>
    metadata={
        "general.architecture": "llama",
        "llama.vocab_size": 49152,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.block_count": 30,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.context_length": 8192,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100_000.0,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    },
    names={**_PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    rotated=True,
)
# huggingface.co/google/gemma-3-270m: every sixth layer reads the whole text, the others 512 tokens.
GEMMA3 = Published(
    config={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    ends=frozenset({1, 106}),  # <eos>, <end_of_turn>
    metadata={
        "general.architecture": "gemma3",
        "gemma3.embedding_length": 640,
        "gemma3.feed_forward_length": 2048,
        "gemma3.block_count": 18,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.context_length": 32_768,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1_000_000.0,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    },
    names={
        **_PROJECTIONS,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_plus=1.0,
)
PUBLISHED = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def reference_weights(path: Path, published: Published) -> dict[str, torch.Tensor]:
    """The file's tensors as transformers names and orders them, in fp32."""
    reader = gguf.GGUFReader(path)
    for key, value in published.metadata.items():
        found = reader.fields[key].contents()
        assert found == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), key
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for i in range(published.config["num_hidden_layers"]):
        for theirs, ours in published.names.items():
            names[f"blk.{i}.{theirs}.weight"] = f"model.layers.{i}.{ours}.weight"
    assert {tensor.name for tensor in reader.tensors} == names.keys()
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        part = tensor.name.split(".")[-2]
        if published.rotated and part in heads:
            # llama.cpp turns neighbours, the checkpoint turns a head's two halves: row 2i + j was row i + j · half.
            n = published.config[heads[part]]
            half = values.shape[0] // n // 2
            order = torch.arange(2 * half).view(half, 2).T.flatten()
            values = values.view(n, 2 * half, -1)[:, order].reshape(values.shape)
        if values.dim() == 1:
            values = values - published.norm_plus
        weights[names[tensor.name]] = values
    return weights


def reference(path: Path, published: Published) -> Any:
    """transformers' model, with every weight from the file."""
    settings = {key: value for key, value in published.config.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**settings)
    model, found = getattr(transformers, published.config["architectures"][0]).from_pretrained(
        None,
        config=config,
        state_dict=reference_weights(path, published),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(found.values()), found  # nothing missing, left over, or of another shape
    return model.eval()


class Pair:
    """A model of ours and transformers', from the same file."""

    def __init__(self, path: Path, published: Published) -> None:
        self.ours = cutaway.load(path)
        self.theirs = reference(path, published)
        self.ends = published.ends

    @torch.no_grad()
    def logits(self, ids: list[int], attention: str = "sdpa") -> torch.Tensor:
        self.theirs.set_attn_implementation(attention)
        return self.theirs(torch.tensor([ids])).logits[0]

    @torch.no_grad()
    def greedy(self, ids: list[int], n: int) -> tuple[list[int], list[float]]:
        """Their continuation with the distance between the two best logits at each step."""
        self.theirs.set_attn_implementation("sdpa")
        cache = transformers.DynamicCache(config=self.theirs.config)
        step, out, margins = torch.tensor([ids]), [], []
        for _ in range(n):
            best = self.theirs(step, cache=cache, use_cache=True).logits[0, -1].topk(2)
            out.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = torch.tensor([[out[-1]]])
        return out, margins


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.getfixturevalue(f"{request.param}_path"), PUBLISHED[request.param])


def _compare_logits(pair: Pair, prompts: list[str]) -> list[int]:
    """max |Δlogit| ≤ 1e-3, and no more than twice what transformers' two attention paths differ by."""
    lengths, worst, own = [], 0.0, 0.0
    for prompt in prompts:
        ids = pair.ours.encode_prompt(prompt)
        lengths.append(len(ids))
        theirs = pair.logits(ids)
        worst = max(worst, float((pair.ours.logits(ids)[0] - theirs).abs().max()))
        own = max(own, float((pair.logits(ids, "eager") - theirs).abs().max()))
    print(f"\n{pair.ours.spec.family}: max |Δ| {worst:.2e}, transformers' own two paths {own:.2e}, lengths {lengths}")
    assert worst <= 1e-3
    assert worst <= 2 * own
    return lengths


def test_logits_short(pair: Pair) -> None:
    """Five of the prompts, one of them past Gemma's window."""
    assert max(_compare_logits(pair, [*PROMPTS[:9:4], PROMPTS[14], PROMPTS[18]])) > 512


@pytest.mark.slow
def test_logits_all(pair: Pair) -> None:
    lengths = _compare_logits(pair, PROMPTS)
    assert min(lengths) <= 2
    assert max(lengths) > 600


def _compare_greedy(pair: Pair, prompts: list[str], n: int) -> None:
    """The same tokens, and an end where the reference has one and nowhere else."""
    ties = 0
    for prompt in prompts:
        ids = pair.ours.encode_prompt(prompt)
        theirs, margins = pair.greedy(ids, n)
        end = next((i for i, token in enumerate(theirs) if token in pair.ends), None)
        if end is not None:  # the loop above goes on past it
            theirs = theirs[: end + 1]
        run = pair.ours.generate(ids, max_tokens=n, temperature=0, stop=None)
        first = next((i for i, (a, b) in enumerate(zip(run.tokens, theirs, strict=False)) if a != b), None)
        if first is not None:
            assert margins[first] < NEAR_TIE, (prompt, first, margins[first])
            ties += 1
            continue
        assert len(run.tokens) == len(theirs), (prompt, run.finish_reason, len(run.tokens), len(theirs))
        assert run.finish_reason == ("length" if end is None else "stop"), prompt
    print(f"\n{pair.ours.spec.family}: {len(prompts)} continuations of {n} tokens the same, {ties} after a near-tie")


def test_greedy_short(pair: Pair) -> None:
    _compare_greedy(pair, [PROMPTS[2], PROMPTS[6], PROMPTS[12]], 16)


@pytest.mark.slow
def test_greedy_all(pair: Pair) -> None:
    _compare_greedy(pair, PROMPTS, 64)
